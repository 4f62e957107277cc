"""Ops of a plan that run without Python: by some lines of C++, where a compiler is (``csrc/planned_ops.cpp``).

PyTorch calls a dispatch mode for each op, in Python, which takes 10 to 20 us of the host. Most ops of a planned step
are the ones that were to come and have nothing to be done: these are run before Python is asked.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

from torch._ops import OpOverload

from lowtide import pytorch_internals
from lowtide.device.native_library import HANDLE, INTEGER, NativeLibrary


class Position(ctypes.Structure):
    """Where a thread is in a plan; C++ reads it and counts ``next`` up.

    Attributes:
        call: The ops that follow each other, as ``known_ops`` returns them; None: each op is Python's.
        mode: ``id`` of the dispatch mode that sees them. Where another one is in place, each op is Python's.
        next: Index of the op that is to come.
        live_bytes: Where the count of what lives stands (``LiveBytes.place``); None: nobody counts.
        more_bytes: So much more than planned may be counted; where more is, an op is Python's,
        unsplit_bytes: but where no more is beyond that, only some are.
        num_beyond: Ops at which more was.
        owner: Who wrote it last, for Python alone.
    """

    _fields_ = (
        ("call", ctypes.c_void_p),
        ("mode", ctypes.c_void_p),
        ("next", ctypes.c_int64),
        ("live_bytes", ctypes.c_void_p),
        ("more_bytes", ctypes.c_int64),
        ("unsplit_bytes", ctypes.c_int64),
        ("num_beyond", ctypes.c_int64),
    )

    call: int | None
    mode: int | None
    next: int
    live_bytes: int | None
    more_bytes: int
    unsplit_bytes: int
    num_beyond: int
    owner: Any = None


_positions: dict[int, Position] = {}  # by address: one object for each, which knows its owner


def prepare(*, waits: bool = False) -> None:
    """Load them; see ``NativeLibrary.prepare``. Not on a PyTorch that nobody has checked them with."""
    if NATIVE.loaded is None and (why := pytorch_internals.why_unchecked(pytorch_internals.STEPS)):
        NATIVE.why_missing = why
    NATIVE.prepare(waits=waits)


def why_missing() -> str:
    """Why each op is Python's; "" where they are there, or may still come."""
    return NATIVE.why_missing


def is_there() -> bool:
    return NATIVE.loaded is not None


def position() -> Position:
    """Of this thread, for as long as the process lives: always the same object."""
    address = NATIVE.loaded.lowtide_ops_position()
    found = _positions.get(address)
    if found is None:
        found = _positions[address] = Position.from_address(address)
    return found


def known_ops(ops: Sequence[OpOverload | None], live_bytes: Sequence[int]) -> int:
    """What ``Position.call`` may be, until ``forget``.

    Args:
        ops: None: that op is Python's.
        live_bytes: Planned to live before each.
    """
    schemas = [None if op is None else op._schema for op in ops]
    names = [None if schema is None else schema.name.encode() for schema in schemas]
    overloads = [None if schema is None else schema.overload_name.encode() for schema in schemas]
    strings = ctypes.c_char_p * len(ops)
    found: int = NATIVE.loaded.lowtide_ops_call(
        len(ops), strings(*names), strings(*overloads), (ctypes.c_int64 * len(ops))(*live_bytes)
    )
    return found


def forget(call: int) -> None:
    NATIVE.loaded.lowtide_ops_free(call)


def _install(library: Any) -> None:
    library.lowtide_ops_install()


_STRINGS = ctypes.POINTER(ctypes.c_char_p)
NATIVE = NativeLibrary(
    "planned_ops",
    "what runs planned ops without Python",
    "LOWTIDE_PLANNED_OPS",
    {
        "lowtide_ops_install": (None, []),
        "lowtide_ops_position": (HANDLE, []),
        "lowtide_ops_call": (HANDLE, [INTEGER, _STRINGS, _STRINGS, ctypes.POINTER(INTEGER)]),
        "lowtide_ops_free": (None, [HANDLE]),
    },
    _install,
)
