"""Load ``SCRIPT.py:FUNCTION`` from the command line: the model, the batch and the step of a user."""

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any


class BadUsageError(Exception):
    """The command line, or what it names, cannot be used; the message says what would do."""


def load_step(target: str) -> tuple[Any, Any, Any]:
    """Load ``SCRIPT.py``, call ``FUNCTION`` and return model, batch and step.

    Raises:
        BadUsageError: there is no such script or function, it fails, or it returns something else.
    """
    script, _, name = target.rpartition(":")
    if not script or not name.isidentifier():
        raise BadUsageError(f"{target!r} does not name a function.\nWrite SCRIPT.py:FUNCTION, e.g. train.py:setup")
    path = Path(script)
    if not path.is_file():
        raise BadUsageError(f"there is no file {script}.\nWrite SCRIPT.py:FUNCTION with the path of a Python script.")
    function = getattr(_load(path), name, None)
    if not callable(function):
        raise BadUsageError(f"{script} has no function {name!r}.\nDefine {name}() so that it returns (model, batch).")
    try:
        returned = function()
    except SystemExit as stop:
        raise BadUsageError(
            f"{target} called sys.exit({stop.code!r}).\nIt must return (model, batch) and leave the process running."
        ) from stop
    except Exception as error:
        traceback.print_exc()
        raise BadUsageError(
            f"{target} raised {type(error).__name__}: {error}\nIt must return (model, batch)."
        ) from error
    return _model_batch_step(target, returned)


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadUsageError(f"{path} is not a Python script: its name does not end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look there
    sys.path.insert(0, str(path.resolve().parent))  # the script may import its neighbours
    try:
        spec.loader.exec_module(module)
    except SystemExit as stop:
        raise BadUsageError(
            f"{path} called sys.exit({stop.code!r}) while it was loaded.\n"
            'Put what runs the script under: if __name__ == "__main__":'
        ) from stop
    except Exception as error:
        traceback.print_exc()
        raise BadUsageError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _model_batch_step(target: str, returned: Any) -> tuple[Any, Any, Any]:
    from torch import nn

    wanted = "Return (model, batch) or (model, batch, step), where step(model, batch) is the scalar loss."
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        what = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else f"type {type(returned).__name__}"
        raise BadUsageError(f"{target} returned {what}.\n{wanted}")
    model, batch, step = (*returned, None)[:3]
    if not isinstance(model, nn.Module):
        raise BadUsageError(f"{target} returned type {type(model).__name__} as model, not an nn.Module.\n{wanted}")
    if step is not None and not callable(step):
        raise BadUsageError(f"{target} returned type {type(step).__name__} as step, which cannot be called.\n{wanted}")
    return model, batch, step
