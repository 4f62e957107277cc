"""A script of rasbt/pytorch-memory-optim, in a checkout of it: ``python rasbt_script.py CHECKOUT SCRIPT``.

The script is as published. Ten batches of random images stand for CIFAR-10, with a validation and a test after them;
the weights are not downloaded.
"""

import runpy
import sys
import types
from pathlib import Path

import torch
import torchvision.models
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(3, 224, 224), at % 10


def loaders(batch_size: int, **_: object) -> tuple[DataLoader, DataLoader, DataLoader]:
    """CIFAR-10's: 45,000 images to train on without the last part of a batch, 5,000 and 10,000 others."""
    return (
        DataLoader(Images(batch_size * 10 + 1), batch_size, drop_last=True, shuffle=True),
        DataLoader(Images(batch_size * 2 + 5000 % batch_size), batch_size),
        DataLoader(Images(batch_size * 2 + 10000 % batch_size), batch_size),
    )


def main() -> None:
    checkout, name = sys.argv[1:]
    sys.modules["local_utilities"] = types.SimpleNamespace(get_dataloaders_cifar10=loaders)  # type: ignore[assignment]
    sys.modules["watermark"] = types.SimpleNamespace(watermark=lambda **_: "")  # type: ignore[assignment]
    made = torchvision.models.vit_l_16
    torchvision.models.vit_l_16 = lambda weights=None, **options: made(**options)
    runpy.run_path(str(Path(checkout) / name), run_name="__main__")


if __name__ == "__main__":
    main()
