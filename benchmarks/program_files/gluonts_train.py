"""GluonTS: DeepAR on series, by Lightning's Trainer; its batches are sampled windows."""

import lightning.pytorch as pl
import numpy as np
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator
from script_arguments import args, keep, show, timed


class Losses(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        show(outputs["loss"])


pl.seed_everything(0)
times = np.arange(300)
series = [{"start": "2025-01-01", "target": np.sin(times / 7 + n) + 2} for n in range(16)]
estimator = DeepAREstimator(
    freq="D", prediction_length=12, context_length=36, num_layers=2, hidden_size=48, dropout_rate=0.1,
    num_batches_per_epoch=20, batch_size=32,
    trainer_kwargs={
        "accelerator": "cpu", "devices": 1, "max_epochs": args.steps // 20, "gradient_clip_val": 10.0,
        "callbacks": [Losses()], "enable_progress_bar": False, "default_root_dir": args.output / "logs",
        "logger": False,
    },
)  # fmt: skip
with timed():
    trained = estimator.train_model(ListDataset(series, freq="D")).trained_net
keep(trained)
