"""The gloo group of one rank of many, for CPU tensors: every other rank is taken to hold what this one holds."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

Tensors = Sequence[torch.Tensor]


def _work(*results: torch.Tensor) -> dist.Work:
    done: Future[Any] = Future()
    done.set_result(list(results))
    return c10d._create_work_from_future(done)


class _Lone(c10d.Backend):
    """Collectives of PyTorch 2.14 and later, whose ``Backend`` Python may extend."""

    def __init__(self, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(rank, size)
        self._options = c10d.Backend.Options("gloo", kwargs.get("timeout", timedelta(minutes=30)))

    @property
    def options(self) -> Any:
        return self._options

    @property
    def supports_splitting(self) -> bool:
        return True

    def split(self, store: Any, ranks: list[int], options: Any) -> "_Lone | None":
        return _Lone(store, sorted(ranks).index(self.rank()), len(ranks)) if self.rank() in ranks else None

    def getBackendName(self) -> str:
        return "gloo"

    def _reduce(self, result: torch.Tensor, own: torch.Tensor, op: Any) -> None:
        """``result`` becomes what ``size`` tensors equal to ``own`` come to."""
        if result is not own:
            result.copy_(own)
        if op == dist.ReduceOp.SUM:
            result.mul_(self.size())
        elif op == dist.ReduceOp.PRODUCT:
            result.pow_(self.size())
        elif op == dist.ReduceOp.BXOR and self.size() % 2 == 0:
            result.zero_()

    @torch.no_grad()
    def allreduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        for tensor in tensors:
            self._reduce(tensor, tensor, opts.reduceOp)
        return _work(*tensors)

    allreduce_coalesced = allreduce

    @torch.no_grad()
    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        return self.allreduce(tensors, opts) if opts.rootRank == self.rank() else _work(*tensors)

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        return _work(*tensors)

    @torch.no_grad()
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        for each, own in zip(outputs, inputs, strict=True):
            for output in each:
                output.copy_(own)
        return _work(*(output for each in outputs for output in each))

    @torch.no_grad()
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        for each in outputs:
            for output, own in zip(each, inputs, strict=True):
                output.copy_(own)
        return _work(*(output for each in outputs for output in each))

    @torch.no_grad()
    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any) -> dist.Work:
        output.view(self.size(), -1).copy_(own.reshape(1, -1))
        return _work(output)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own, opts)
        return _work(*outputs)

    @torch.no_grad()
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        return self.allgather(outputs, inputs, opts) if opts.rootRank == self.rank() else _work(*inputs)

    @torch.no_grad()
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        if opts.rootRank == self.rank():
            outputs[0].copy_(inputs[0][self.rank()])
        return _work(*outputs)

    @torch.no_grad()
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        for output, each in zip(outputs, inputs, strict=True):
            self._reduce(output, each[self.rank()], opts.reduceOp)
        return _work(*outputs)

    @torch.no_grad()
    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> dist.Work:
        own = given.reshape(self.size(), -1)[self.rank()]
        self._reduce(output, own.view_as(output), opts.reduceOp)
        return _work(output)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        for output, given in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, given, opts)
        return _work(*outputs)

    @torch.no_grad()
    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any
    ) -> dist.Work:
        sizes = input_sizes or [given.shape[0] // self.size()] * self.size()
        own = given.split(sizes)[self.rank()]
        for part in output.split(output_sizes or sizes):
            part.copy_(own if part.shape == own.shape else 0)  # counts that were not exchanged
        return _work(output)

    @torch.no_grad()
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> dist.Work:
        for output in outputs:
            output.copy_(inputs[self.rank()] if output.shape == inputs[self.rank()].shape else 0)
        return _work(*outputs)

    def send(self, tensors: Tensors, rank: int, tag: int) -> dist.Work:
        return _work(*tensors)

    @torch.no_grad()
    def recv(self, tensors: Tensors, rank: int, tag: int) -> dist.Work:
        for tensor in tensors:
            tensor.zero_()
        return _work(*tensors)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        return self.recv(tensors, 0, tag)

    def barrier(self, opts: Any = None) -> dist.Work:
        return _work(torch.zeros(1))


def _fake(store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's own "fake" group, where Python may not extend ``Backend``: its sums are this rank's own."""
    import torch.testing._internal.distributed.fake_pg as fake_pg

    make = getattr(fake_pg.FakeProcessGroup, "_create_internal", fake_pg.FakeProcessGroup)
    return make(rank, size)


LoneGloo: Callable[..., Any] = _Lone if hasattr(c10d.Backend, "new_window") else _fake
