"""What a module is called in its model, from the Python frames of what it allocated: ``model.layers.*.mlp``.

Frames say classes, one in the other; the model says where such a class lies below such another. Where several lie, the
calling line says which one it calls. Layers that are repeated have one name.
"""

import ast
import linecache
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cuda_standin.script import record

_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_ATTRIBUTE = re.compile(r"self\.(\w+)")


class Place(NamedTuple):
    """A file and a line of it, in some module's forward."""

    file: str
    line: int


class Named(NamedTuple):
    """``name`` is empty for a whole model, or where it is not known; ``count``: how many modules have it."""

    module: str
    name: str = ""
    count: int = 1  # type: ignore[assignment]  # hides the method of tuples


class ModuleNames:
    """Of the modules of a process.

    Args:
        modules: All of them; those that no other holds are the models.
    """

    def __init__(self, modules: list[Any]) -> None:
        held = {id(child) for module in modules for child in module._modules.values()}
        self._counts: Counter[tuple[str, str]] = Counter()  # by name and class
        for module in modules:
            if id(module) not in held:
                for name, found in module.named_modules():
                    self._counts[_folded(name), _defines_forward(type(found))] += 1

    def of(self, places: tuple[Place, ...]) -> Named:
        """Of the innermost module of the script or of a package; of PyTorch's own where that is the whole model.

        Args:
            places: In forwards, the innermost first.
        """
        own = [place for place in places if not record.is_machinery(place.file)]
        inner = own[0] if own else places[0]
        found = self._of(places[places.index(inner) :])
        return found if found.name or inner is places[0] else self._of(places)

    def _of(self, places: tuple[Place, ...]) -> Named:
        """The names below one another that fit the classes, from the outermost on, of the last that is a module's."""
        at: set[str] = set()
        last = ""
        caller: Place | None = None
        for place in reversed(places):
            kind = class_at(*place)
            below = {
                name for name, known in self._counts
                if known == kind and (not last or any(_is_below(name, above) for above in at))
            }  # fmt: skip
            if below:
                at, last = _called(below, caller), kind
            caller = place
        name = _joined(at)
        if not name:
            return Named(class_at(*places[0]))
        return Named(last, name, sum(self._counts[one, last] for one in at))


def _folded(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _defines_forward(kind: type) -> str:
    return next((base.__name__ for base in kind.__mro__ if "forward" in vars(base)), kind.__name__)


def _is_below(name: str, above: str) -> bool:
    return name != above and (not above or name.startswith(above + "."))


def _called(names: set[str], caller: Place | None) -> set[str]:
    """Those that the caller's line speaks of; all where it speaks of none."""
    if caller is None or len(names) == 1:
        return names
    spoken = set(_ATTRIBUTE.findall(linecache.getline(*caller)))
    return {name for name in names if spoken & set(name.split("."))} or names


def _joined(names: set[str]) -> str:
    """``layers.*.up|down``: what they have in common once, without what wrappers call what they wrap."""
    rows = [[part for part in name.split(".") if part not in _WRAPPED] for name in sorted(names)]
    if len({len(row) for row in rows}) != 1:
        return ""
    columns = [list(dict.fromkeys(column)) for column in zip(*rows)]
    if sum(len(column) > 1 for column in columns) > 1:
        return ""
    return ".".join("|".join(column) for column in columns)


@cache
def class_at(file: str, line: int) -> str:
    """The class whose body that line is in."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return record.short(file)
    inner = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]  # fmt: skip
    return inner[-1].name if inner else f"{record.short(file)}:{line}"
