"""pytorch-forecasting: a temporal fusion transformer on series, by Lightning's Trainer."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.metrics import QuantileLoss
from script_arguments import args, keep, show, timed


class Losses(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        show(outputs["loss"])


pl.seed_everything(0)
times = np.arange(120)
table = pd.concat([
    pd.DataFrame({"time": times, "group": str(n), "value": np.sin(times / 7 + n) + n / 4}) for n in range(8)
], ignore_index=True)  # fmt: skip
data = TimeSeriesDataSet(
    table, time_idx="time", target="value", group_ids=["group"], max_encoder_length=24, max_prediction_length=6,
    time_varying_known_reals=["time"], time_varying_unknown_reals=["value"], static_categoricals=["group"],
)  # fmt: skip
model = TemporalFusionTransformer.from_dataset(
    data, hidden_size=24, attention_head_size=2, dropout=0.1, hidden_continuous_size=12, loss=QuantileLoss(),
    learning_rate=0.01,
)  # fmt: skip
trainer = pl.Trainer(
    accelerator="cpu", devices=1, max_steps=args.steps, gradient_clip_val=0.1, logger=False, callbacks=[Losses()],
    enable_progress_bar=False, enable_checkpointing=False,
)  # fmt: skip
with timed():
    trainer.fit(model, train_dataloaders=data.to_dataloader(train=True, batch_size=64, num_workers=0))
keep(model)
