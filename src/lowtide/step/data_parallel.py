"""``DistributedDataParallel``: the module inside it is taped, and rehearsals run without its gradient hooks.

DDP has hooks where gradients accumulate. They would count a rehearsal: under ``static_graph`` the counts of the first
backward are what all later ones wait for, and ``find_unused_parameters`` notes which parameters were used. So a
rehearsal runs on aliases of the parameters: the same memory, without those hooks.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.step.deepspeed_engines import unwrap_engine

_wrappers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[DistributedDataParallel]] = weakref.WeakKeyDictionary()


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that is taped: what a ``DistributedDataParallel``, a DeepSpeed engine or the result of
    ``lowtide.compile`` has inside, else ``model``."""
    model = vars(model).get("lowtide_inside", unwrap_engine(model))
    if not isinstance(model, DistributedDataParallel):
        return model
    _wrappers[model.module] = weakref.ref(model)
    return model.module


def ddp_wrapper_of(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper around ``model``; None if none is known.

    Lightning wraps a model that was fitted before: that wrapper shows during its own forward, and its buckets stay.
    """
    active = DistributedDataParallel._active_ddp_module
    if active is not None and active.module is model:
        _wrappers[model] = weakref.ref(active)
        return active
    known = _wrappers.get(model)
    return None if known is None else known()


def ddp_bucket_bytes(model: nn.Module) -> int:
    """Bytes of DDP's buckets: as many as the gradients have, or none where gradients are views of the buckets."""
    wrapper = ddp_wrapper_of(model)
    if wrapper is None or wrapper.gradient_as_bucket_view:
        return 0
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def unseen_bucket_bytes(model: nn.Module) -> int:
    """Bytes of DDP's buckets that no gradient there is now is a view of."""
    wrapper = ddp_wrapper_of(model)
    if wrapper is None:
        return 0
    trained = [p for p in model.parameters() if p.requires_grad]
    return sum(p.nbytes for p in trained if p.grad is None or not wrapper.gradient_as_bucket_view)


def gradients_are_buckets(model: nn.Module) -> bool:
    """Gradients are views of DDP's buckets, which stay when ``zero_grad`` lets go of the gradients."""
    wrapper = ddp_wrapper_of(model)
    return wrapper is not None and wrapper.gradient_as_bucket_view


@contextmanager
def preserve_ddp_state(model: nn.Module) -> Iterator[None]:
    """Inside, the parameters of a model in DDP are aliases of the same memory."""
    modules = [] if ddp_wrapper_of(model) is None else list(model.modules())
    places = [(m, name, p) for m in modules for name, p in m._parameters.items() if p is not None]
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
