"""fastai: an XResNet by fit_one_cycle, with Mixup."""

import torch
from fastai.callback.mixup import MixUp
from fastai.callback.schedule import Learner
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Callback
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import set_seed
from fastai.vision.models.xresnet import xresnet18
from script_arguments import args, keep, show, timed


class Losses(Callback):
    def after_batch(self):
        if self.training:
            show(self.learn.loss)


set_seed(0)
rows = [(image, label) for image, label in zip(torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,)), strict=True)]
loaders = DataLoaders(DataLoader(rows, bs=16, shuffle=True, num_workers=0), DataLoader(rows[:16], bs=16, num_workers=0))
model = xresnet18(n_out=10)
learner = Learner(loaders, model, loss_func=CrossEntropyLossFlat(), cbs=[MixUp(), Losses()])
with learner.no_bar(), learner.no_logging(), timed():
    learner.fit_one_cycle(args.steps // 8, 1e-3)
keep(model)
