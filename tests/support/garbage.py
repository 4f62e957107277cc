"""Full collections stay short: what a process has imported by now is no garbage, and is not looked through again.

Each measured step looks for garbage first. Where a file has imported all of transformers, that took up to 40 % of the
tests' time. ``living`` says what is none yet.
"""

import ctypes
import gc
import time
import weakref
from collections.abc import Mapping
from typing import Any

import psutil
import pytest
import torch

_SLOW_S = 0.05
_HELD_BY_A_THREAD_S = 2.0
_LARGE_BYTES = 2**30


def living(*references: weakref.ref[Any]) -> int:
    """How many live after a collection. An accelerator's thread may hold something for a moment after a backward."""
    until_s = time.perf_counter() + _HELD_BY_A_THREAD_S
    while True:
        gc.collect()
        count = sum(reference() is not None for reference in references)
        if not count or torch.get_default_device().type == "cpu" or time.perf_counter() > until_s:
            return count
        time.sleep(1e-3)


class ShortCollections:
    """A plugin. After a test in which a full collection took longer than that, what lives is left out of later ones."""

    def __init__(self) -> None:
        self._start_s = 0.0
        self._was_slow = False
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._start_s = time.perf_counter()
        elif info["generation"] == 2 and time.perf_counter() - self._start_s > _SLOW_S:
            self._was_slow = True

    def pytest_runtest_logfinish(self) -> None:
        """Between tests: a cycle of a test that is half over would never be freed."""
        if self._was_slow:
            gc.collect()
            gc.freeze()
            self._was_slow = False


class SmallHeap:
    """A plugin. A worker that holds a gigabyte has malloc give back what it keeps after each test, others each file.

    Else it holds the most that any of its tests took, beside what the next one takes.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        self._process = psutil.Process()

    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        ends_file = nextitem is None or nextitem.path != item.path
        if self._trim is not None and (ends_file or self._process.memory_info().rss > _LARGE_BYTES):
            self._trim(0)
