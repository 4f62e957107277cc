"""Where the host waits for the device, with the line of Python."""

import ctypes
import functools
import sys
from types import ModuleType
from typing import Any

from cuda_standin import loading
from cuda_standin.script import record

_kept: list[Any] = []  # C++ calls it: it must live


def install(torch: ModuleType) -> None:
    @ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    def waited(operator: bytes) -> None:
        note(operator.decode().removeprefix("aten::"), sys._getframe(1) if sys._getframe().f_back else None)

    _kept.append(waited)
    library = loading.values()
    if hasattr(library, "standin_on_wait"):
        library.standin_on_wait(waited)
    # What waits without an operator.
    for owner, name in (
        (torch.cuda, "synchronize"),
        (torch.cuda.Stream, "synchronize"),
        (torch.cuda.Event, "synchronize"),
    ):
        setattr(owner, name, _noted(getattr(owner, name), f"{owner.__name__.split('.')[-1]}.{name}"))


def note(what: str, frame: Any) -> None:
    if record.facts.get("counted"):
        return
    line, _ = record.lines_of(frame)
    record.stops[line, what] = record.stops.get((line, what), 0) + 1


def _noted(function: Any, what: str) -> Any:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        note(what, sys._getframe(1))
        return function(*args, **kwargs)

    return wrapped
