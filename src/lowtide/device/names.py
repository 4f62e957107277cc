"""Which devices are here, what they are called, and the module through which PyTorch drives one.

A device is found from tensors and models, never assumed. PyTorch knows one kind of accelerator in a process.
"""

import platform
from pathlib import Path
from typing import Any

import torch

from lowtide.errors import DeviceError


def is_accelerator(device: str | torch.device) -> bool:
    """Whether ``device`` has memory and streams of its own."""
    return (device if isinstance(device, torch.device) else torch.device(device)).type not in ("cpu", "meta")


def accelerator_type() -> str:
    """The kind of accelerator that is here; "" if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None else found.type


def index_of(device: str | torch.device) -> int:
    """The number of an accelerator; of the current one if ``device`` has none."""
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def module_of(device: str | torch.device) -> Any:
    """``torch.<device type>``. Raises: DeviceError: this PyTorch has none."""
    kind = torch.device(device).type
    try:
        return torch.get_device_module(kind)
    except RuntimeError as error:
        raise DeviceError(f"this torch {torch.__version__} has no module for {kind}. {_here()}") from error


def check_is_here(device: str | torch.device) -> None:
    """Raises: DeviceError: ``device`` is not on this machine; the message names the devices that are."""
    try:
        asked = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"device {device!r} is not known to torch {torch.__version__}. {_here()}") from error
    if asked.type == "cpu":
        return
    if asked.type != accelerator_type() or (asked.index or 0) >= torch.accelerator.device_count():
        raise DeviceError(f"there is no device {asked} here. {_here()}")


def _here() -> str:
    kind = accelerator_type()
    names = ["cpu", *(f"{kind}:{i}" for i in range(torch.accelerator.device_count() if kind else 0))]
    return f"Here are: {', '.join(names)}."


def device_name(device: str | torch.device = "cpu") -> str:
    """Return the model name that ``device`` reports; else its type, of a CPU the machine's."""
    if is_accelerator(device):
        named = getattr(module_of(device), "get_device_name", None)
        return str(named(index_of(device))) if named is not None else torch.device(device).type
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] not in ("", "unknown") else platform.machine() or "cpu"


def autocast_types() -> list[str]:
    """Kinds of devices on which autocast may be on."""
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]
