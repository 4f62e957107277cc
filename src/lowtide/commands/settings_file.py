"""Read a configuration file: YAML, JSON or TOML."""

import json
import tomllib
from pathlib import Path
from typing import Any

from lowtide.scripts import BadUsageError


def read_settings(path: Path) -> dict[str, Any]:
    """The names and values in ``path``.

    Raises:
        BadUsageError: it cannot be read, is damaged, or holds no names; or PyYAML is missing for a YAML file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadUsageError(f"cannot read settings from {path}: {error}.") from error
    try:
        found = _parsed(text, path)
    except BadUsageError:
        raise
    except Exception as error:  # each parser has errors of its own
        raise BadUsageError(f"{path} cannot be parsed: {error}.") from error
    if not isinstance(found, dict) or not found:
        raise BadUsageError(f"{path} holds no settings.\nWrite names with values: recompute_granularity: full")
    return found


def _parsed(text: str, path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix == ".toml":
        return tomllib.loads(text)
    try:
        import yaml
    except ImportError as error:
        raise BadUsageError(
            f"{path} is YAML, and PyYAML is not installed.\nInstall it with: pip install pyyaml, or write JSON."
        ) from error
    return yaml.safe_load(text)
