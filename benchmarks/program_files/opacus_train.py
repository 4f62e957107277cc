"""Opacus: DP-SGD with its Poisson sampling, so that batches have other sizes each time."""

import torch
from opacus import PrivacyEngine
from script_arguments import args, keep, show, timed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.ReLU(),
    nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10),
)  # fmt: skip
loader = DataLoader(TensorDataset(torch.randn(512, 1, 28, 28), torch.randint(0, 10, (512,))), batch_size=32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.1, max_grad_norm=1.0,
    noise_generator=torch.Generator().manual_seed(1),
)  # fmt: skip
criterion = nn.CrossEntropyLoss()

model.train()
step = 0
with timed():
    while step < args.steps:
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            show(loss)
            step += 1
            if step == args.steps:
                break
keep(model._module)
