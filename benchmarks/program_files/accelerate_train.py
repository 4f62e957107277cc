"""A loop of Accelerate: accelerate launch --cpu --num_processes 1 accelerate_train.py --output ... [--checkpointing]"""

import argparse
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

parser = argparse.ArgumentParser()
parser.add_argument("--output", required=True)
parser.add_argument("--steps", type=int, default=240)
parser.add_argument("--checkpointing", action="store_true")
args = parser.parse_args()

set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForCausalLM.from_pretrained("model")
model.config.use_cache = False
if args.checkpointing:
    model.gradient_checkpointing_enable()
chats = load_dataset("json", data_files="data/chats.json", split="train")
rows = chats.map(lambda row: tokenizer(row["instruction"] + " " + row["output"]), remove_columns=chats.column_names)
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
loader = DataLoader(rows, batch_size=8, shuffle=True, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

model.train()
began, step = time.perf_counter(), 0
while step < args.steps:
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print({"loss": loss.item()})
        step += 1
        if step == args.steps:
            break
accelerator.print({"train_runtime": time.perf_counter() - began})
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained(args.output)
