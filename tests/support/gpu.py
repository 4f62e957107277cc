"""Whether CUDA is a GPU's here, or that of the stand-in (cuda_standin/README.md), which computes on the host."""

import sys

import torch


def is_gpus(device: str | torch.device) -> bool:
    """Whether ``device`` is one of a real GPU."""
    standin = sys.modules.get("cuda_standin")  # which loads PyTorch where it stands in
    return torch.device(device).type == "cuda" and not (standin is not None and standin.is_loaded())
