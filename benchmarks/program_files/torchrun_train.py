"""A loop of DistributedDataParallel: torchrun --nproc-per-node 2 torchrun_train.py --output ... [--checkpointing]"""

import argparse
import json
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--output", required=True)
parser.add_argument("--steps", type=int, default=240)
parser.add_argument("--checkpointing", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForCausalLM.from_pretrained("model")
model.config.use_cache = False
if args.checkpointing:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
with open("data/chats.json") as file:
    texts = [row["instruction"] + " " + row["output"] for row in json.load(file)]
ids = torch.tensor([tokenizer(text)["input_ids"] for text in texts])
sampler = DistributedSampler(ids, shuffle=True, seed=0)
loader = DataLoader(ids, batch_size=8, sampler=sampler)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

ddp.train()
began, step, epoch = time.perf_counter(), 0, 0
while step < args.steps:
    sampler.set_epoch(epoch)
    for batch in loader:
        loss = ddp(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print({"loss": loss.item()}, flush=True)
        step += 1
        if step == args.steps:
            break
    epoch += 1
if dist.get_rank() == 0:
    print({"train_runtime": time.perf_counter() - began}, flush=True)
    model.save_pretrained(args.output)
dist.destroy_process_group()
