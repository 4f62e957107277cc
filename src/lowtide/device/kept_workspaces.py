"""What an accelerator's libraries take at the first matrix product and keep: taken before a step is counted.

cuBLAS keeps a workspace for each stream and each thread that multiplies: the one of the forward pass, and the device's
own, in which backward runs. In a step it would look like memory of the step, and no later step would take it.
"""

import threading
from contextlib import suppress

import torch
from torch._C import _current_graph_task_id as graph_task
from torch.autograd import Variable

from lowtide.device.names import is_accelerator
from lowtide.device.streams import current_stream


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
