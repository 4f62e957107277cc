"""What an accelerator's libraries take at the first matrix product and keep: taken before a step is counted.

cuBLAS keeps a workspace for each stream and each thread that multiplies: the one of the forward pass, and the device's
own, in which backward runs. In a step it would look like memory of the step, and no later step would take it. From
PyTorch 2.15 on a product gives it back.
"""

import threading
from contextlib import suppress
from functools import cache

import torch
from torch._C import _current_graph_task_id as graph_task
from torch.autograd import Variable

from lowtide.device.block_size import in_blocks
from lowtide.device.names import is_accelerator
from lowtide.device.streams import current_stream, synchronize


class KeptWorkspaces:
    """Has them taken, once for each stream and thread."""

    def __init__(self) -> None:
        self._taken: set[tuple[torch.device, int, int]] = set()

    def take(self, device: torch.device) -> None:
        """On the present stream of ``device``, where products of this thread and of its backwards run."""
        if not is_accelerator(device) or graph_task() != -1:
            return
        key = device, current_stream(device).stream_id, threading.get_ident()
        if key in self._taken:
            return
        self._taken.add(key)
        with suppress(RuntimeError, NotImplementedError):  # no memory, or no such kernel: the step itself tells
            _multiply(device)


def give_back_workspaces(device: torch.device) -> None:
    """Have ``device`` keep none: the next product of each thread takes its own again, where there is room then."""
    clear = getattr(torch._C, f"_{device.type}_clearCublasWorkspaces", None)
    if clear is not None:
        synchronize(device)
        clear()


@cache
def product_workspace_bytes(device: torch.device) -> int:
    """What a product of matrices takes on ``device`` and gives back, beside what it makes; 0 where nobody tells."""
    with suppress(RuntimeError, NotImplementedError, KeyError):
        with torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.no_grad():
            x = torch.zeros(1, 1, dtype=torch.float32, device=device)
            torch.mm(x, x)  # takes what is kept
            before = _allocated_so_far(device)
            made = torch.mm(x, x)
            taken = _allocated_so_far(device) - before
        return max(0, taken - in_blocks(made.nbytes, device.type))
    return 0


def _allocated_so_far(device: torch.device) -> int:
    return int(torch.accelerator.memory_stats(device)["allocated_bytes.all.allocated"])


def _multiply(device: torch.device) -> None:
    with (
        torch._C._DisableTorchDispatch(),  # no op of whoever watches this thread
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        x = torch.zeros(1, 1, dtype=torch.float32, device=device, requires_grad=True)
        product = torch.mm(x, x)
        # The engine itself: no backward of whoever is told of backwards.
        Variable._execution_engine.run_backward(
            (product,), (torch.zeros_like(product),), False, False, (x,), allow_unreachable=True, accumulate_grad=False
        )
