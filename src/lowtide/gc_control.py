"""Python's garbage collector, kept out of what it would only slow down or disturb."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Keep the collector from running inside the block; as it was before, afterwards. For the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield  # the collector is the process's: without it a training step beside would keep its cycles, tensors too
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
