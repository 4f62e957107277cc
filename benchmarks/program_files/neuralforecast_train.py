"""NeuralForecast: PatchTST on series, by Lightning's Trainer."""

import numpy as np
import pandas as pd
import pytorch_lightning as pl
from neuralforecast import NeuralForecast
from neuralforecast.models import PatchTST
from script_arguments import args, keep, show, timed


class Losses(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        show(outputs["loss"])


days = pd.date_range("2025-01-01", periods=200)
table = pd.concat([
    pd.DataFrame({"unique_id": str(n), "ds": days, "y": np.sin(np.arange(200) / 7 + n) + 2}) for n in range(16)
], ignore_index=True)  # fmt: skip
model = PatchTST(
    h=12, input_size=72, encoder_layers=3, n_heads=4, hidden_size=48, linear_hidden_size=96, dropout=0.1,
    patch_len=8, stride=4, max_steps=args.steps, batch_size=16, windows_batch_size=64, random_seed=0,
    callbacks=[Losses()], accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
    enable_checkpointing=False,
)  # fmt: skip
forecast = NeuralForecast(models=[model], freq="D")
with timed():
    forecast.fit(table)
keep(forecast.models[0])
