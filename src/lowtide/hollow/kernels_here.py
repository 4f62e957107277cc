"""What a kernel of a device that is there is about to allocate beside its outputs, before it was ever measured."""

from functools import cache
from typing import Any

import torch

from lowtide.hollow.cuda_workspaces import workspace_bytes
from lowtide.hollow.devices import TargetDevice


def unmeasured_workspace_bytes(func: Any, args: tuple, device: torch.device) -> int:
    """Of one call on an accelerator, by formula; 0 where there is none for its kernels."""
    target = _target(device)
    if target is None:
        return 0
    try:
        return workspace_bytes(func, args, target)
    except (AttributeError, IndexError, TypeError, ValueError):  # given in another way than the formula reads it
        return 0


@cache
def _target(device: torch.device) -> TargetDevice | None:
    """None: nobody knows its kernels. AMD's divide reductions otherwise."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    facts = torch.cuda.get_device_properties(device)
    return TargetDevice("cuda", facts.name, (facts.major, facts.minor), facts.multi_processor_count)
