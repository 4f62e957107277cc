"""Calls of layers without gradients: compiled as PyTorch compiles them, beside what trains.

Dynamo keeps what it compiles with a code object and counts it there: past its limit the object is left as it is for
good. It also remembers there which sizes have changed. So these calls have a code object of their own, one for each
kind of layer, which goes with the model. Lengths that no training step knows then cost training nothing.
"""

from collections.abc import Callable
from typing import Any

import torch


def compiled_without_gradients(kind: type, *, dynamic: bool, round_as_eager: bool) -> Callable[..., Any]:
    """A function that calls its first argument, a method of a layer of that kind, with the others.

    Nothing is compiled before its first call. Its bits, its limit and its graph breaks are PyTorch's own: what changes
    from call to call becomes a symbol, and past ``torch._dynamo.config.recompile_limit`` calls run as they are.
    """

    def without_gradients(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    # ``replace`` makes a new object. By its name Dynamo tells apart what it has seen of sizes.
    name = f"{kind.__name__}_without_gradients"
    without_gradients.__code__ = without_gradients.__code__.replace(co_name=name)
    options: dict[str, Any] | None = {"emulate_precision_casts": True} if round_as_eager else None
    return torch.compile(without_gradients, dynamic=dynamic or None, options=options)
