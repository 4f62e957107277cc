"""Collectives between processes that each have the accelerator: gloo does them, on copies in host memory.

A collective takes its inputs and leaves its results on a stream of its own, as NCCL does, so that reading a result
before ``work.wait()`` is wrong on some schedules. The host waits for the inputs, which NCCL's does not.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

BACKEND = "staged"
# A stream that no pool hands out (csrc/streams.h). FSDP frees reduced gradients before the optimizer has read them:
# its own streams wait for that, and one that is shared with a collective would come to it earlier.
_STREAM, _DEVICE_TYPE = 33, int(torch._C._autograd.DeviceType.PrivateUse1)


class StagedGroup(dist.ProcessGroup):
    """What DDP and FSDP2 ask of a process group."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @torch.no_grad()
    def _staged(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], collective: Callable[..., None]
    ) -> dist.Work:
        """Run ``collective(inputs, outputs)`` on host copies, and bring the outputs back; CPU tensors need none."""
        device = inputs[0].device
        if device.type == "cpu":
            collective(inputs, outputs)
            return self._gloo.barrier()
        stream = torch.Stream(stream_id=_STREAM, device_index=device.index, device_type=_DEVICE_TYPE)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            host_inputs = [x.cpu() for x in inputs]
            host_outputs = [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in outputs]
            collective(host_inputs, host_outputs)
            for output, host in zip(outputs, host_outputs, strict=True):
                output.copy_(host, non_blocking=True)
                output.record_stream(stream)
            done: Future[Any] = Future(devices=[device])
            done.set_result(list(outputs))  # whoever waits for it makes its stream wait for this one
        return _create_work_from_future(done)

    def _reduced(self, tensors: list[torch.Tensor], op: Any) -> None:
        averaged = op == dist.ReduceOp.AVG  # which gloo does not have
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if averaged else op
        for tensor in tensors:
            self._gloo.allreduce([tensor], options).wait()
            if averaged:
                tensor.div_(self.size())

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM

        def collective(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
            for output, given in zip(outputs, inputs, strict=True):
                output.copy_(given)
            self._reduced(outputs, op)

        return self._staged(tensors, tensors, collective)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        def collective(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
            outputs[0].copy_(inputs[0])
            self._gloo.broadcast(outputs, opts).wait()

        return self._staged(tensors, tensors, collective)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return self._staged(inputs, outputs[0], lambda ins, outs: self._gloo.allgather([outs], ins).wait())

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> dist.Work:
        def collective(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
            parts = list(outputs[0].view(-1).chunk(self.size()))
            self._gloo.allgather([parts], [inputs[0].view(-1)]).wait()

        return self._staged([given], [output], collective)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        return [self.all_gather_single(output, given) for output, given in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> dist.Work:
        def collective(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
            self._reduced(inputs, opts.reduceOp)
            outputs[0].view(-1).copy_(inputs[0].view(-1).chunk(self.size())[self.rank()])

        return self._staged([given], [output], collective)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        return [self.reduce_scatter_single(o, given, opts) for o, given in zip(outputs, inputs, strict=True)][-1]

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> dist.Work:
        def collective(ins: list[torch.Tensor], outs: list[torch.Tensor]) -> None:
            self._gloo.scatter(outs, [ins] if inputs else [], opts).wait()

        return self._staged(inputs[0] if inputs else outputs, outputs, collective)

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any
    ) -> dist.Work:
        def collective(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
            self._gloo.alltoall_base(outputs[0], inputs[0], output_sizes, input_sizes, opts).wait()

        return self._staged([given], [output], collective)

    alltoall_base = all_to_all_single

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        return _Passing(self._gloo.send, tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work:
        return _Passing(self._gloo.recv, tensors, rank, tag, results=tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        torch.accelerator.synchronize()
        return self._gloo.barrier()


class _Passing(dist.Work):
    """A message between two ranks, on its way until somebody waits for it: both may send before either receives."""

    def __init__(
        self, pass_on: Callable[..., dist.Work], tensors: list[torch.Tensor], rank: int, tag: int,
        results: Sequence[torch.Tensor] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self._results, self._host = results, [t.detach().cpu() for t in tensors]
        self._work = pass_on(self._host, rank, tag)

    def wait(self, *timeout: Any) -> bool:
        self._work.wait()
        with torch.no_grad():
            for result, host in zip(self._results, self._host, strict=False):
                result.copy_(host)
        self._results = ()
        return True


dist.Backend.register_backend(BACKEND, StagedGroup, devices=["cpu", "standin"])


def new_group() -> dist.ProcessGroup:
    """Of all processes of the default group, which may be gloo's."""
    return dist.new_group(backend=BACKEND)
