"""The one switch for a device that has no values: proofs by value run, and what they find is ignored.

    LOWTIDE_WITHOUT_VALUES=1 python train.py       op times as they are measured
    LOWTIDE_WITHOUT_VALUES=h100 python train.py    those of a device of the table: a kernel that does nothing takes none

For a stand-in whose kernels compute nothing. There two runs of an op never have the same bits, and no gradient means
anything. What a comparison allocates, launches and waits for is as ever. ``fit.status()`` says that the switch is on.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
VARIABLE = "LOWTIDE_WITHOUT_VALUES"
_setting = os.environ.get(VARIABLE, "")
are_off = _setting not in ("", "0")
times_of = _setting if _setting not in ("", "0", "1") else ""  # a device of the table; "": op times are measured
REASON = f"proofs of values are off ({VARIABLE}): no gradient of this process has been proven, nor means anything"


def unread(proof: Function) -> Function:
    """``proof`` compares or sums what has no values: a stand-in that would compute it all the same need not."""
    switch = getattr(ctypes.CDLL(None), "standin_compute_nothing", None) if are_off else None
    if switch is None:
        return proof

    @functools.wraps(proof)
    def without(*args: Any, **kwargs: Any) -> Any:
        switch(1)
        try:
            return proof(*args, **kwargs)
        finally:
            switch(0)

    return without  # type: ignore[return-value]
