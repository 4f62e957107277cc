"""Lengths of a CTC loss, where a dispatch mode looks on.

``torch.ctc_loss`` with lengths as tensors reads them on the host and goes on with numbers, wherever they lie, unless a
vendor's kernel takes the tensors. Under a dispatch mode, anybody's, it goes on with the tensors, and on a device those
of the host raise: "Expected all tensors to be on the same device". They are brought to the device here: the kernel is
the same, and so are the bits. Where the vendor's kernel would take the loss with numbers it gets those, from wherever
they lie: another kernel has other bits.
"""

from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack as num_modes
from torch.utils._python_dispatch import _disable_current_modes

_own = torch.ctc_loss


def put_in_place() -> None:
    torch.ctc_loss = _ctc_loss  # ``torch.nn.functional`` looks it up in every call


def take_away() -> None:
    if torch.ctc_loss is _ctc_loss:
        torch.ctc_loss = _own


def _ctc_loss(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0, *args: Any, **kwargs: Any
) -> Any:
    lengths = [input_lengths, target_lengths]
    if num_modes() and all(map(_can_be_read, lengths)) and not _is_on_host(log_probs):
        with _disable_current_modes():
            on_host = any(map(_is_on_host, lengths))
            if on_host or not _is_vendors(log_probs, targets, *lengths, blank):
                numbers = [length.tolist() for length in lengths]
                own_kernel = not _is_vendors(log_probs, targets, *numbers, blank)
                lengths = [length.to(log_probs.device) for length in lengths] if own_kernel else numbers
    return _own(log_probs, targets, *lengths, blank, *args, **kwargs)


def _is_vendors(*arguments: Any) -> bool:
    """Whether the vendor's kernel takes the loss. On most devices there is none, and nobody to ask."""
    try:
        return bool(torch._use_cudnn_ctc_loss(*arguments))
    except NotImplementedError:
        return False


def _can_be_read(value: Any) -> bool:
    return type(value) is torch.Tensor and not value.is_meta


def _is_on_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"
