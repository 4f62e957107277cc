"""Models whose parameters have no memory: of one that exists, or of a configuration of transformers."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lowtide.errors import UnsupportedModelError
from lowtide.hollow.memory import UNKNOWN, hollow, hollow_like, mark_origin
from lowtide.hollow.ranks import hollow_part, is_shared


def is_config(value: Any) -> bool:
    """Whether ``value`` is a configuration of transformers."""
    return not isinstance(value, nn.Module) and hasattr(value, "model_type") and hasattr(value, "to_dict")


def model_of(config: Any) -> nn.Module:
    """The model that ``config`` describes, in train mode and its type; to be called under a ``HollowMode``.

    Raises:
        UnsupportedModelError: transformers has no class for it.
    """
    import transformers

    dtype = getattr(config, "dtype", None) or torch.float32
    dtype = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    kind = next((getattr(transformers, n, None) for n in getattr(config, "architectures", None) or ()), None)
    if kind is None:
        listed = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        if type(config) not in listed:
            raise UnsupportedModelError(
                f"the {type(config).__name__} names no architecture, and is of no causal language model.\n"
                "Pass the model itself, made on the meta device, or set config.architectures."
            )
        kind = listed[type(config)]
    if hasattr(config, "use_cache"):
        config.use_cache = False
    # ``post_init`` would draw every weight; with nothing to hold them that is time alone.
    initialization = importlib.import_module("transformers.initialization")
    skipped = getattr(initialization, "no_init_weights", nullcontext)
    with skipped():
        model = kind._from_config(config, dtype=dtype)
    model.tie_weights()  # skipped with the drawing
    made: nn.Module = model.train()
    return made


def language_batch(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """A batch for a causal language model: token 0 everywhere, and as labels."""
    ids = torch.zeros(rows, tokens, dtype=torch.int64, device="cpu")
    return {"input_ids": ids, "labels": ids.clone()}


def hollow_batch(batch: Any) -> Any:
    """``batch`` on the CPU: what is on ``meta`` is hollow, and zeros where it holds integers."""
    if isinstance(batch, torch.Tensor):
        if not batch.is_meta:
            return batch.cpu()
        if batch.is_floating_point() or batch.is_complex():
            return hollow_like(batch).requires_grad_(batch.requires_grad)
        zeros = torch.zeros(batch.shape, dtype=batch.dtype, device="cpu")
        mark_origin(zeros, UNKNOWN)
        return zeros
    if isinstance(batch, (tuple, list)):
        return type(batch)(map(hollow_batch, batch)) if type(batch) in (tuple, list) else batch
    return {name: hollow_batch(value) for name, value in batch.items()} if hasattr(batch, "items") else batch


@contextmanager
def hollow_parameters(model: nn.Module) -> Iterator[None]:
    """Inside, the parameters of ``model`` have no memory and lie on the CPU, and so do buffers that have no values.

    Other buffers are copied to the CPU if they are elsewhere: positions and frequencies decide masks and branches.
    """
    made: dict[int, torch.Tensor] = {}
    homes: dict[int, torch.UntypedStorage] = {}  # parameters may be parts of one storage
    replaced: list[tuple[nn.Module, str, Any]] = []
    try:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    new = made.get(id(parameter))
                    if new is None:
                        new = made[id(parameter)] = _hollow_parameter(parameter, homes)
                    replaced.append((module, name, parameter))
                    setattr(module, name, new)
            for name, buffer in list(module._buffers.items()):
                if buffer is not None and buffer.device.type != "cpu":
                    replaced.append((module, name, buffer))
                    module._buffers[name] = made.setdefault(id(buffer), hollow_batch(buffer))
        yield
    finally:
        for module, name, before in reversed(replaced):
            if isinstance(before, nn.Parameter):
                setattr(module, name, before)
            else:
                module._buffers[name] = before


def _hollow_parameter(parameter: nn.Parameter, homes: dict[int, torch.UntypedStorage]) -> nn.Parameter:
    kind = type(parameter)
    if is_shared(parameter):
        return hollow_part(parameter)
    if kind is not nn.Parameter and kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        raise UnsupportedModelError(
            f"a parameter is a {kind.__name__}: subclass parameters have no hollow form yet.\n"
            "Trace on the device itself: leave device= out."
        )
    storage, home = parameter.untyped_storage(), torch.empty(0, dtype=parameter.dtype, device="cpu")
    if storage._cdata not in homes:
        homes[storage._cdata] = hollow((storage.nbytes(),), (1,), torch.uint8).untyped_storage()
    home.set_(homes[storage._cdata], parameter.storage_offset(), parameter.shape, parameter.stride())
    new = nn.Parameter(home, requires_grad=parameter.requires_grad)
    new.__dict__.update(vars(parameter))
    if parameter.grad is not None:
        new.grad = hollow_like(parameter.grad)
    if parameter._backward_hooks:
        new._backward_hooks = parameter._backward_hooks
    return new
