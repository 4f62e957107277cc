"""Batches of any form: how a model is called with one, which tensors it holds, its rows."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Call:
    """A batch as the positional and keyword arguments of one call."""

    args: tuple
    kwargs: dict[str, Any]


def call_model(model: nn.Module, batch: Any) -> Any:
    """A mapping is called ``model(**batch)``, a tuple or list ``model(*batch)``, anything else ``model(batch)``."""
    call = call_of(batch)
    return model(*call.args, **call.kwargs)


def call_of(batch: Any) -> Call:
    """The arguments that ``call_model`` passes."""
    if isinstance(batch, Call):
        return batch
    if isinstance(batch, (tuple, list)):
        return Call(tuple(batch), {})
    return Call((), {**batch}) if _is_mapping(batch) else Call((batch,), {})


def batch_tensors(batch: Any) -> list[torch.Tensor]:
    """Every tensor of a batch, or of what a model returned, however deep, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    parts: Iterable[Any] = ()
    if isinstance(batch, (list, tuple)):
        parts = batch
    elif _is_mapping(batch):  # before dataclasses: the outputs of transformers are both
        parts = batch.values()
    elif is_dataclass(batch) and not isinstance(batch, type):
        parts = (getattr(batch, field.name, None) for field in fields(batch))
    return [tensor for part in parts for tensor in batch_tensors(part)]


def describe_batch(batch: Any) -> str:
    """Shapes and dtypes, for messages."""
    if isinstance(batch, Call):
        batch = {**{str(i): a for i, a in enumerate(batch.args)}, **batch.kwargs}
    if _is_mapping(batch):
        return ", ".join(f"{k}: {_shape(v)}" for k, v in batch.items())
    return ", ".join(map(_shape, batch if isinstance(batch, (list, tuple)) else [batch]))


def rows(batch: Any) -> int:
    """Leading size of the first tensor that has one."""
    return next((t.shape[0] for t in batch_tensors(batch) if t.dim()), 1)


def first_rows(batch: Any, count: int) -> Any:
    """The batch cut down to ``count`` rows; what has another leading size stays whole."""
    have = rows(batch)

    def cut(value: Any) -> Any:
        per_row = isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == have
        return value[:count] if per_row else value

    return _map(batch, cut)


def without_history(batch: Any) -> Any:
    """The batch with leaves in place of tensors that another graph made: rehearsing must not run backward into it."""

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().requires_grad_() if value.requires_grad and not value.is_leaf else value
        if type(value) in (list, tuple):
            return type(value)(map(cut, value))
        return {k: cut(v) for k, v in value.items()} if type(value) is dict else value

    return batch if all(t.is_leaf for t in batch_tensors(batch)) else _map(batch, cut)


def _map(batch: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(batch, Call):
        return Call(tuple(map(change, batch.args)), {k: change(v) for k, v in batch.kwargs.items()})
    if _is_mapping(batch):
        return {k: change(v) for k, v in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [change(v) for v in batch]
    return change(batch)


def _is_mapping(batch: Any) -> bool:
    """Dicts, and what acts like one (transformers' BatchEncoding)."""
    return callable(getattr(batch, "keys", None)) and callable(getattr(batch, "values", None))


def _shape(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
