"""A loop of DeepSpeed's engine, ZeRO-2: deepspeed --num_gpus 1 deepspeed_train.py --output ... [--checkpointing]"""

import argparse
import json
import time

import deepspeed
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--output", required=True)
parser.add_argument("--steps", type=int, default=240)
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()

config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
    "steps_per_print": 100_000,
}
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForCausalLM.from_pretrained("model")
model.config.use_cache = False
if args.checkpointing:
    model.gradient_checkpointing_enable()
with open("data/chats.json") as file:
    texts = [row["instruction"] + " " + row["output"] for row in json.load(file)]
ids = torch.tensor([tokenizer(text)["input_ids"] for text in texts])
loader = DataLoader(ids, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(0))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

engine.train()
began, step = time.perf_counter(), 0
while step < args.steps:
    for batch in loader:
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        print({"loss": loss.item()}, flush=True)
        step += 1
        if step == args.steps:
            break
print({"train_runtime": time.perf_counter() - began}, flush=True)
model.save_pretrained(args.output)
engine.destroy()
torch.distributed.destroy_process_group()
