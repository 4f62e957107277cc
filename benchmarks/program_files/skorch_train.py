"""skorch: a classifier that scikit-learn calls, with its validation and early stopping."""

import numpy as np
import torch
from script_arguments import args, keep, show, timed
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, GradientNormClipping
from torch import nn


class Losses(Callback):
    def on_batch_end(self, net, training, **_):
        if training:
            show(net.history[-1, "batches", -1, "train_loss"])


torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(48, 4, 192, dropout=0.1, batch_first=True)
module = nn.Sequential(
    nn.Linear(8, 48), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Flatten(), nn.LazyLinear(5),
    nn.Softmax(dim=-1),
)  # fmt: skip
generator = np.random.default_rng(0)
inputs, labels = generator.normal(size=(320, 24, 8)).astype(np.float32), generator.integers(0, 5, 320)
module(torch.from_numpy(inputs[:2]))  # the size of the lazy layer
net = NeuralNetClassifier(
    module, optimizer=torch.optim.AdamW, lr=1e-3, batch_size=32, max_epochs=args.steps // 8, verbose=0,
    iterator_train__shuffle=True, callbacks=[Losses(), GradientNormClipping(1.0)],
)  # fmt: skip
with timed():
    net.fit(inputs, labels)
keep(net.module_)
