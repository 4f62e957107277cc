"""The name of a device, so that plans and tables say where a number comes from."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def device_name(device: str | torch.device = "cpu") -> str:
    """Return the model name that ``device`` reports; the machine type where a CPU reports none."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] not in ("", "unknown") else platform.machine() or "cpu"
