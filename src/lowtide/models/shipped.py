"""Dimensions of well-known open models: a JSON file each, with its source and parameter count. No weights."""

import json
from pathlib import Path
from typing import Any

from lowtide.errors import LowtideError
from lowtide.options import did_you_mean

_FOLDER = Path(__file__).parent


class UnknownModelError(LowtideError, ValueError):
    """No model of that name is shipped, and no config stands there."""


def model_names() -> tuple[str, ...]:
    """Names of the shipped models."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def model_facts(name: str) -> dict[str, Any]:
    """Return ``name``, ``source``, ``parameters`` and ``config`` (with ``model_type``).

    Args:
        name: A shipped name, in any case; a path to a ``config.json``, or to the directory that holds one. Those have
            ``parameters`` None.

    Raises:
        UnknownModelError: neither is there, or the file is not a config.
    """
    shipped = _FOLDER / f"{name.strip().lower().split('/')[-1]}.json"
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return {"name": str(path), "source": str(path), "parameters": None, "config": _config(path)}
    if shipped.is_file():
        return dict(json.loads(shipped.read_text(encoding="utf-8")))
    hint = did_you_mean(name.lower(), model_names())
    raise UnknownModelError(
        f"model {name!r} is neither shipped nor a config.json or a directory with one.{hint} "
        f"Shipped are {', '.join(model_names())}."
    )


def _config(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownModelError(f"{path} is not a model's config: {error}.") from error
    if not isinstance(body, dict) or not isinstance(body.get("model_type"), str):
        raise UnknownModelError(f"{path} is not a model's config: it has no 'model_type'.")
    return body
