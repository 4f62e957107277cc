"""What the tape's own work for an op costs a step: its time where the host is the bound, nearly nothing elsewhere.

A device runs behind the host that launches its kernels. As long as it has kernels left to run, nobody waits for what
the host does besides. Where launching takes the host longer than the device needs, the step takes as long as the host.

Numbers are in launches: a watched step shows what one takes on this host, whichever it is. They were taken from GPT-2
under plans of different budgets on the CUDA stand-in, and what a tensor costs that travels to host memory from a GPU
(``benchmarks/gpu_loops.py``).
"""

from collections.abc import Sequence
from typing import NamedTuple

from lowtide.device import planned_ops
from lowtide.graph.step_graph import StepGraph

# In microseconds: an op of a plan with nothing to be done, seen by the tape or not; dropped besides; replayed.
_SEEN_US, _UNSEEN_US, _RECORD_US, _REPLAY_US = 15.0, 2.0, 15.0, 10.0
# In launches: an op of a plain step, with the Python of the model around it; what the tape adds.
_FORWARD_OP, _BACKWARD_OP, _RECORD, _REPLAY, _MOVE = 1.0, 0.5, 7.5, 4.5, 10.0
_WORTH_TELLING_MS = 5.0
_DROPPED_SHARE = 0.25  # of what autograd stores, in a plan that nobody has made yet


class TapeCosts(NamedTuple):
    """Microseconds as in ``Costs``, and how long host and device need for what autograd runs forward and backward."""

    dispatch_us: float
    record_us: float
    replay_us: float
    move_us: float = 0.0
    host_ms: tuple[float, float] = (0.0, 0.0)
    device_ms: tuple[float, float] = (0.0, 0.0)

    def told(self) -> str:
        """In a sentence, where the host is the bound; "" elsewhere."""
        slow = [n for n in (0, 1) if self.host_ms[n] > self.device_ms[n] + _WORTH_TELLING_MS]
        if not slow:
            return ""
        where = " and ".join(("forward", "backward")[n] for n in slow)
        host, device = (sum(ms[n] for n in slow) for ms in (self.host_ms, self.device_ms))
        return (
            f"the host is the bound of {where}: with a plan it needs about {host:.0f} ms there, and the device "
            f"{device:.0f} ms. Plans drop fewer and larger tensors then, and overheads may be off. Larger batches, or "
            "lowtide.compile, leave the host less to do"
        )


def tape_costs(graph: StepGraph, op_ms: Sequence[float], launch_us: float | None) -> TapeCosts:
    """Of a step of ``graph``.

    Args:
        launch_us: What one op takes to be launched on a device; None: the step runs on a CPU.
    """
    dispatch_us = _UNSEEN_US if planned_ops.is_there() else _SEEN_US
    if launch_us is None:
        return TapeCosts(dispatch_us, _RECORD_US, _REPLAY_US)
    num_forward, num_dropped = len(graph.forward_ops), _DROPPED_SHARE * len(graph.saved)
    forward_ms = sum(op_ms[op.id] for op in graph.forward_ops)
    device_ms = (forward_ms, sum(op_ms) - forward_ms)
    launches = (
        _FORWARD_OP * num_forward + _RECORD * num_dropped,
        _BACKWARD_OP * (len(graph.ops) - num_forward) + _REPLAY * num_dropped,
    )
    host_ms = (launches[0] * launch_us / 1e3, launches[1] * launch_us / 1e3)
    forward, backward = (_share_not_hidden(*ms) for ms in zip(host_ms, device_ms, strict=True))
    record_us = _RECORD_US + forward * max(0.0, _RECORD * launch_us - _RECORD_US)
    replay_us = _REPLAY_US + backward * max(0.0, _REPLAY * launch_us - _REPLAY_US)
    move_us = backward * _MOVE * launch_us
    return TapeCosts(dispatch_us, record_us, replay_us, move_us, host_ms, device_ms)


def _share_not_hidden(host_ms: float, device_ms: float) -> float:
    """Of what the host does: none as long as it needs half of the device's time, all once it needs as much."""
    return min(1.0, max(0.0, 2.0 * host_ms / device_ms - 1.0)) if device_ms > 0 else 1.0
