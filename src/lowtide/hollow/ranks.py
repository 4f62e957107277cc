"""One of many ranks that are not there: a process group that sends nothing, and parameters that ranks share.

Collectives over the group return at once; under a ``HollowMode`` their results have no memory. What is wrapped inside
for several ranks (DTensor, transformers' plans) is wrapped as on a real one of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.errors import UnsupportedModelError
from lowtide.hollow.memory import hollow_like


@contextmanager
def fake_ranks(count: int, rank: int = 0) -> Iterator[None]:
    """Inside, this process is ``rank`` of ``count``.

    Raises:
        UnsupportedModelError: it is one of several ranks already.
    """
    import torch.distributed as dist
    from torch.distributed.tensor import debug
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UnsupportedModelError(
            "torch.distributed is initialised in this process, so it cannot stand for a rank that is not there.\n"
            "Plan in a process of its own."
        )
    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor remembers layouts with the group that they were on, which is no more.
        debug._clear_sharding_prop_cache()


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a DTensor: this rank's part of one that several ranks share."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "_spec")


def hollow_part(parameter: Any) -> nn.Parameter:
    """A parameter that ranks share, this rank's part of it without memory and dense."""
    data = parameter.data
    part = type(data)(hollow_like(data._local_tensor), data._spec, requires_grad=False)
    new = nn.Parameter(part, requires_grad=parameter.requires_grad)
    new.__dict__.update({k: v for k, v in vars(parameter).items() if k not in ("_local_tensor", "_spec")})
    return new
