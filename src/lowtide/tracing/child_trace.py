"""``trace`` without memory in a process of its own, where a stray read or write of hollow memory does no harm.

A kernel of another library that is handed a hollow tensor's address and runs past its range ends the child, not the
caller. The graph comes back as JSON.
"""

import json
import multiprocessing
import pickle
import tempfile
from typing import Any

from lowtide.errors import LowtideError, UnsupportedModelError
from lowtide.graph.json_format import from_dict
from lowtide.graph.step_graph import StepGraph, to_dict
from lowtide.hollow.devices import TargetDevice
from lowtide.tracing.sources import trace
from lowtide.tracing.tracer import Step


def trace_in_child(
    model: Any, batch: Any, *, device: str | TargetDevice, step: Step | None = None, optimizer: Any = None
) -> StepGraph:
    """As ``trace`` with ``device``, in a forked process.

    Raises:
        LowtideError: the process died; the message says of which signal. Whatever ``trace`` raises.
        UnsupportedModelError: this system cannot fork.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise UnsupportedModelError("this system cannot fork a process.\nTrace in this one: lowtide.trace(device=...).")
    with tempfile.NamedTemporaryFile() as file:
        child = multiprocessing.get_context("fork").Process(
            target=_write, args=(file.name, model, batch, device, step, optimizer)
        )
        child.start()
        child.join()
        written = file.read()
    if child.exitcode or not written:
        code = child.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise LowtideError(
            f"the process that traced without memory ended with {how}: a kernel of another library touched memory that "
            "is not there.\nTrace on the device itself: leave device= out."
        )
    result = pickle.loads(written)
    if isinstance(result, BaseException):
        raise result
    return from_dict(json.loads(result))


def _write(path: str, model: Any, batch: Any, device: str | TargetDevice, step: Step | None, optimizer: Any) -> None:
    try:
        result: Any = json.dumps(to_dict(trace(model, batch, step=step, optimizer=optimizer, device=device)))
    except Exception as error:
        result = error
    try:
        written = pickle.dumps(result)
        pickle.loads(written)
    except Exception:  # an error with arguments of its own
        written = pickle.dumps(LowtideError(f"{type(result).__name__}: {result}"))
    with open(path, "wb") as file:
        file.write(written)
