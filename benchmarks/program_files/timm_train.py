"""timm's recipe: a ViT with stochastic depth, Mixup, EMA, AdamW by its factory, layer decay."""

import torch
from script_arguments import args, keep, show, timed
from timm import create_model
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, dispatch_clip_grad, random_seed

random_seed(0)
model = create_model(
    "vit_tiny_patch16_224", img_size=64, patch_size=8, embed_dim=96, depth=6, num_heads=3, num_classes=10,
    drop_path_rate=0.1, drop_rate=0.1,
)  # fmt: skip
if args.checkpointing:
    model.set_grad_checkpointing()
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
schedule = CosineLRScheduler(optimizer, t_initial=args.steps, warmup_t=10, t_in_epochs=False)
ema = ModelEmaV3(model, decay=0.99)
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)
criterion = SoftTargetCrossEntropy()
images, labels = torch.randn(64, 3, 64, 64), torch.randint(0, 10, (64,))

model.train()
with timed():
    for step in range(args.steps):
        chosen = torch.randperm(64)[:16]
        mixed, target = mixup(images[chosen].clone(), labels[chosen])
        loss = criterion(model(mixed), target)
        loss.backward()
        dispatch_clip_grad(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model, step)
        schedule.step_update(step)
        show(loss)
keep(ema.module)
