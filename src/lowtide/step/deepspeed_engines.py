"""DeepSpeed, known by what it leaves on a model: nothing here imports it.

An engine holds the module that is taped. Under ZeRO-0, 1 and 2 that module's parameters are whole at all times, and its
gradients leave through hooks of the accumulators. Under ZeRO-3 they are whole only between hooks around each module
(``sharding.zero3``).
"""

from collections.abc import Iterable

from torch import nn

_ENGINE = "DeepSpeedEngine"  # ``deepspeed.runtime.engine``
_OTHER_ENGINES = frozenset({"PipelineEngine", "DeepSpeedHybridEngine"})  # run the module in ways of their own
_PARTITIONED = "ds_status"  # what ZeRO-3 puts on each parameter that it partitions


def unwrap_engine(model: nn.Module) -> nn.Module:
    """What a DeepSpeed engine trains, else ``model`` itself."""
    kinds = {kind.__name__ for kind in type(model).__mro__}
    return model.module if _ENGINE in kinds and not kinds & _OTHER_ENGINES else model


def is_partitioned(parameters: Iterable[nn.Parameter]) -> bool:
    """ZeRO-3 has partitioned some of ``parameters``: they have memory only while it has gathered them."""
    return any(hasattr(p, _PARTITIONED) for p in parameters)
