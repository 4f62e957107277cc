"""Runs in the script's own process under ``--advise``: one change of what the script does, as an option would make it.

Loaded by path (``cuda_standin.script``). ``LOWTIDE_PRETEND_CHANGE`` names the changes. The report says which were made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any


def start(torch: ModuleType) -> None:
    from cuda_standin.script import record

    def made(how: str) -> None:
        changes = record.facts.setdefault("changes", [])
        if how not in changes:
            changes.append(how)

    for name in os.environ["LOWTIDE_PRETEND_CHANGE"].split(","):
        _CHANGES[name](torch, made)


def _checkpointing(torch: ModuleType, made: Callable[[str], None]) -> None:
    def change(model: Any) -> bool:
        enable = getattr(model, "gradient_checkpointing_enable", None) or getattr(
            model, "enable_gradient_checkpointing", None
        )  # transformers; diffusers
        if enable is None or getattr(model, "is_gradient_checkpointing", False):
            return False
        enable()
        made(f"{type(model).__name__}.{enable.__name__}()")
        return True

    _before_training(torch, change)


def _chunked_loss(torch: ModuleType, made: Callable[[str], None]) -> None:
    def change(model: Any) -> bool:
        from lowtide import LowtideError
        from lowtide.long_sequences import prepare

        try:
            prepare(model, chunk_loss=True, tile_mlp=None, say=None)
        except LowtideError:
            return False
        made("lowtide.fit(..., chunk_loss=True)")
        return True

    _before_training(torch, change)


def _eight_bit_states(torch: ModuleType, made: Callable[[str], None]) -> None:
    import inspect

    try:
        import bitsandbytes.optim as eight_bit
    except ImportError:
        return

    for name in ("Adam", "AdamW"):
        ours = getattr(eight_bit, f"{name}8bit")
        known = set(inspect.signature(ours).parameters)

        def instead(parameters: Any, *args: Any, ours: Any = ours, known: set[str] = known, **options: Any) -> Any:
            made(f"bitsandbytes.optim.{ours.__name__}")
            return ours(parameters, *args, **{key: value for key, value in options.items() if key in known})

        setattr(torch.optim, name, instead)


_pending: list[Callable[[Any], bool]] = []


def _before_training(torch: ModuleType, change: Callable[[Any], bool]) -> None:
    """Calls ``change`` with each module that is called with gradients, outermost first, until one can be changed."""
    _pending.append(change)
    if len(_pending) > 1:
        return
    call = torch.nn.Module.__call__

    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and module.training:
            _pending[:] = [change for change in _pending if not change(module)]
            if not _pending:
                torch.nn.Module.__call__ = call
        return module(*args, **kwargs) if not _pending else call(module, *args, **kwargs)

    torch.nn.Module.__call__ = called


_CHANGES = {"checkpointing": _checkpointing, "chunked-loss": _chunked_loss, "8-bit": _eight_bit_states}
