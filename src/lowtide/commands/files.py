"""Files that a command line names: read, written, or refused with the way out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowtide.scripts import BadUsageError


def check_folders(*paths: Path | None) -> None:
    """Raises: BadUsageError: a file cannot be written because its folder is not there."""
    for path in filter(None, paths):
        if not path.parent.is_dir():
            raise BadUsageError(f"cannot write {path}: there is no folder {path.parent}.\nMake it first.")


def read(path: Path, load: Callable[[Path], Any], what: str, option: str) -> Any:
    """What ``load`` makes of the file. Raises: BadUsageError: it is not there, or no text."""
    how = f"Write one with: lowtide fit ... {option}"
    try:
        return load(path)
    except OSError as error:
        raise BadUsageError(f"cannot read {what} from {path}: {error.strerror}.\n{how}") from error
    except UnicodeDecodeError as error:
        raise BadUsageError(f"{path} is not {what}: it is not text.\n{how}") from error


def write(path: Path, save: Callable[[Path], Any]) -> None:
    """Raises: BadUsageError: the file cannot be written."""
    try:
        save(path)
    except OSError as error:
        raise BadUsageError(f"cannot write {path}: {error.strerror}.\nName a file in a folder that exists.") from error
