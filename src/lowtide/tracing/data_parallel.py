"""Data parallel models: which module is taped, and rehearsals that no gradient reducer notices.

``DistributedDataParallel`` has hooks where gradients accumulate. Run by a rehearsal they would count: under
``static_graph`` the counts of the first backward are what all later ones wait for, and ``find_unused_parameters``
notes which parameters were used. So a rehearsal runs on aliases: the same memory, without those hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_wrappers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[DistributedDataParallel]] = weakref.WeakKeyDictionary()


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that is taped: what a ``DistributedDataParallel`` has inside, else ``model`` itself."""
    if not isinstance(model, DistributedDataParallel):
        return model
    _wrappers[model.module] = weakref.ref(model)
    return model.module


def wrapper_of(model: nn.Module) -> DistributedDataParallel | None:
    """The wrapper that ``model`` is known to be in."""
    active = DistributedDataParallel._active_ddp_module
    if active is not None and active.module is model:
        return active
    known = _wrappers.get(model)
    return None if known is None else known()


def bucket_bytes(model: nn.Module) -> int:
    """What the reducer holds beside the gradients: as much again, unless they are views of its buckets."""
    wrapper = wrapper_of(model)
    if wrapper is None or wrapper.gradient_as_bucket_view:
        return 0
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


@contextmanager
def preserve_ddp_state(model: nn.Module) -> Iterator[None]:
    """Inside, the parameters of a model that a reducer watches are aliases of the same memory."""
    if wrapper_of(model) is None:
        yield
        return
    places = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    aliases: dict[int, nn.Parameter] = {}
    try:
        for module, name, p in places:
            if id(p) not in aliases:
                aliases[id(p)] = nn.Parameter(p.detach(), requires_grad=p.requires_grad)
                aliases[id(p)].__dict__.update(p.__dict__)
            setattr(module, name, aliases[id(p)])  # by attribute: an RNN keeps a list of its own up to date
        yield
    finally:
        for module, name, p in places:
            setattr(module, name, p)
