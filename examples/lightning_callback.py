"""A LightningModule whose `training_step` calls its parts: `LowtideCallback` is the only argument that is new."""

import time

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lowtide.integrations.lightning import LowtideCallback
from lowtide.measurement.allocator import measuring


class Autoencoder(pl.LightningModule):
    def __init__(self, width=256, layers=4):
        super().__init__()
        self.losses = []
        self.encoder, self.decoder = (
            nn.Sequential(
                *(m for _ in range(layers) for m in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()))
            )
            for _ in range(2)
        )

    def training_step(self, x, batch_idx):
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Peak(pl.Callback):
    """Measures the last batch, and waits for the plan, as this training is so short."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 2:
            [c.fit.wait() for c in trainer.callbacks if isinstance(c, LowtideCallback)]
        self.start = time.perf_counter() if batch_idx <= 3 else self.start
        self.measuring = measuring("cpu")
        self.memory = self.measuring.__enter__()

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.measuring.__exit__(None, None, None)


def train(*callbacks):
    pl.seed_everything(0, verbose=False)
    model, peak = Autoencoder(), Peak()
    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[*callbacks, peak], **options)
    trainer.fit(model, DataLoader(torch.randn(10 * 2048, 256), batch_size=2048))
    return model.losses, peak.memory.peak / 2**20, time.perf_counter() - peak.start


torch.set_num_threads(1)
losses, plain_mib, plain_s = train()
found, mib, seconds = train(LowtideCallback(budget="50%"))
assert found == losses, "the bits are the same"
print(f"peak {plain_mib:.1f} MiB -> {mib:.1f} MiB, {plain_s:.2f} s -> {seconds:.2f} s, losses identical")
