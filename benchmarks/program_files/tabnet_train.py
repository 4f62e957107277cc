"""pytorch-tabnet's classifier on a table."""

import numpy as np
import torch
from pytorch_tabnet.callbacks import Callback
from pytorch_tabnet.tab_model import TabNetClassifier
from script_arguments import args, keep, show, timed


class Losses(Callback):
    def on_batch_end(self, batch, logs=None):
        show(logs["loss"])


torch.manual_seed(0)
generator = np.random.default_rng(0)
table, labels = generator.normal(size=(2048, 30)), generator.integers(0, 4, 2048)
classifier = TabNetClassifier(n_d=24, n_a=24, n_steps=4, seed=0, verbose=0, device_name="cpu")
with timed():
    classifier.fit(table, labels, max_epochs=args.steps // 4, batch_size=512, virtual_batch_size=128,
                   callbacks=[Losses()])  # fmt: skip
keep(classifier.network)
