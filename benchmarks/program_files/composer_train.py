"""Composer's Trainer on a model of transformers: python composer_train.py --output ... [--checkpointing]"""

import argparse
import json
import time

import torch
from composer import Callback, Trainer
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

parser = argparse.ArgumentParser()
parser.add_argument("--output", required=True)
parser.add_argument("--steps", type=int, default=240)
parser.add_argument("--checkpointing", action="store_true")
args = parser.parse_args()


class Losses(Callback):
    def batch_end(self, state, logger):
        print({"loss": state.loss.item()}, flush=True)


torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForCausalLM.from_pretrained("model")
model.config.use_cache = False
if args.checkpointing:
    model.gradient_checkpointing_enable()
with open("data/chats.json") as file:
    rows = [tokenizer(row["instruction"] + " " + row["output"]) for row in json.load(file)]
loader = DataLoader(rows, batch_size=8, shuffle=True, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
composed = HuggingFaceModel(model, tokenizer=tokenizer, use_logits=True, shift_labels=True)
optimizer = torch.optim.AdamW(composed.parameters(), lr=1e-3)
trainer = Trainer(
    model=composed, train_dataloader=loader, optimizers=optimizer, max_duration=f"{args.steps}ba", device="cpu", seed=0,
    device_train_microbatch_size=8, callbacks=[Losses()], progress_bar=False,
)  # fmt: skip
began = time.perf_counter()
trainer.fit()
print({"train_runtime": time.perf_counter() - began})
model.save_pretrained(args.output)
