"""PyTorch Ignite's supervised trainer, accumulated, with an EMA of the weights."""

import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import EMAHandler
from script_arguments import args, keep, show, timed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24), nn.GELU()) for _ in range(6)]
model = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), *blocks, nn.Flatten(), nn.Dropout(0.2), nn.Linear(24 * 256, 10))
data = TensorDataset(torch.randn(128, 3, 16, 16), torch.randint(0, 10, (128,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss(), gradient_accumulation_steps=2)
EMAHandler(model, momentum=0.01).attach(trainer, event=Events.ITERATION_COMPLETED)
trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: show(engine.state.output))
with timed():
    trainer.run(DataLoader(data, batch_size=16, shuffle=True), max_epochs=args.steps // 8)
keep(model)
