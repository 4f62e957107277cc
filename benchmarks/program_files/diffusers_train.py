"""diffusers' text-to-image loop as its examples write it: a UNet on noised latents, EMA, clipping, Accelerate."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from script_arguments import args, keep, show, timed
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
accelerator = Accelerator(cpu=True)
unet = UNet2DConditionModel(
    sample_size=16, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32, attention_head_dim=4,
    norm_num_groups=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
)  # fmt: skip
if args.checkpointing:
    unet.enable_gradient_checkpointing()
ema = EMAModel(unet.parameters(), model_cls=UNet2DConditionModel, model_config=unet.config)
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
schedule = get_scheduler("cosine", optimizer, num_warmup_steps=10, num_training_steps=args.steps)
loader = DataLoader(TensorDataset(torch.randn(64, 4, 16, 16), torch.randn(64, 7, 32)), batch_size=8, shuffle=True)
unet, optimizer, loader, schedule = accelerator.prepare(unet, optimizer, loader, schedule)

unet.train()
step = 0
with timed():
    while step < args.steps:
        for latents, texts in loader:
            with accelerator.accumulate(unet):
                noise = torch.randn_like(latents)
                timesteps = torch.randint(0, 1000, (len(latents),))
                predicted = unet(noise_scheduler.add_noise(latents, noise, timesteps), timesteps, texts).sample
                loss = F.mse_loss(predicted, noise)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            ema.step(unet.parameters())
            show(loss)
            step += 1
            if step == args.steps:
                break
ema.copy_to(unet.parameters())
keep(accelerator.unwrap_model(unet))
