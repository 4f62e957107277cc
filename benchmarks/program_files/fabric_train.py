"""Lightning Fabric: bf16-mixed, accumulated, clipped."""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from script_arguments import args, keep, show, timed
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM

fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
fabric.launch()
fabric.seed_everything(0)
model = AutoModelForCausalLM.from_pretrained("model")
model.config.use_cache = False
if args.checkpointing:
    model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = fabric.setup(model, optimizer)
tokens = TensorDataset(torch.randint(10, 240, (96, 80), generator=torch.Generator().manual_seed(0)))
loader = fabric.setup_dataloaders(DataLoader(tokens, batch_size=8, shuffle=True))

model.train()
step = 0
with timed():
    while step < args.steps:
        for (ids,) in loader:
            accumulates = step % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                logits = model(input_ids=ids).logits[:, :-1]
                loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                fabric.backward(loss / 2)
            if not accumulates:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            show(loss)
            step += 1
            if step == args.steps:
                break
keep(model.module)
