"""DeepSpeed, known by what it leaves on a model: nothing here imports it.

An engine holds the module that is taped. Under ZeRO-0, 1 and 2 that module's parameters are whole at all times, and its
gradients leave through hooks of the accumulators. Under ZeRO-3 they are whole only between hooks around each module.
"""

from collections.abc import Iterable

from torch import nn

_ENGINE = "DeepSpeedEngine"  # ``deepspeed.runtime.engine``
_PARTITIONED = "ds_status"  # what ZeRO-3 puts on each parameter that it partitions


def unwrap_engine(model: nn.Module) -> nn.Module:
    """What a DeepSpeed engine trains, else ``model`` itself."""
    if any(kind.__name__ == _ENGINE for kind in type(model).__mro__):
        return model.module
    return model


def is_partitioned(parameters: Iterable[nn.Parameter]) -> bool:
    """ZeRO-3 has partitioned some of ``parameters``: they have memory only while it has gathered them."""
    return any(hasattr(p, _PARTITIONED) for p in parameters)
