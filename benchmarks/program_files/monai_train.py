"""MONAI's SupervisedTrainer: SwinUNETR on images, DiceCE loss."""

import torch
from monai.engines import SupervisedTrainer
from monai.handlers import StatsHandler
from monai.losses import DiceCELoss
from monai.networks.nets import SwinUNETR
from monai.utils import set_determinism
from script_arguments import args, keep, show, timed
from torch.utils.data import DataLoader

set_determinism(0)
model = SwinUNETR(
    in_channels=1, out_channels=3, feature_size=12, spatial_dims=2, use_checkpoint=args.checkpointing
)  # fmt: skip
rows = [{"image": torch.randn(1, 64, 64), "label": torch.randint(0, 3, (1, 64, 64))} for _ in range(32)]
trainer = SupervisedTrainer(
    device=torch.device("cpu"), max_epochs=args.steps // 8,
    train_data_loader=DataLoader(rows, batch_size=4, shuffle=True),
    network=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), optim_set_to_none=True,
    loss_function=DiceCELoss(to_onehot_y=True, softmax=True),
    train_handlers=[StatsHandler(iteration_print_logger=lambda engine: show(engine.state.output[0]["loss"]))],
)  # fmt: skip
with timed():
    trainer.run()
keep(model)
