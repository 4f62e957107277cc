"""What earlier runs found out about the variants of a layer, on disk: a later run searches, reads and times nothing.

The key is a digest of the layer's joint graph, its device, PyTorch's settings and the versions. What is kept decides
which variants are worth compiling, and no more: a variant that a plan uses is compiled (PyTorch's own cache has its
kernels), its code is read and its bits are proven in every run. So an entry that is wrong costs time, and neither
memory nor bits.

A file that is damaged, another user's, or writable for others is ignored.
"""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from lowtide import __version__
from lowtide.cache_files import cache_dir, keep_newest, read_file, write_file
from lowtide.compiled.generated_code import VariantMemory
from lowtide.compiled.saved_sets import SavedSet

_VERSION = 3
_MOST_FILES = 200
_MOST_SEARCHES = 100


@dataclass(frozen=True)
class KnownVariant:
    """One variant, as a run left it; see ``Variant``.

    Attributes:
        step_ms: 0 where it was only read.
        refused: Why it may not be used.
    """

    saved: SavedSet
    memory: VariantMemory
    step_ms: float
    error: float
    code_ms: float
    refused: str


class KnownVariants:
    """Those of one layer.

    Args:
        key: What ``layer_digest`` says of it.

    Attributes:
        variants: By name.
        searched: Digests of the steps and limits for which they are all that a search proposes.
    """

    def __init__(self, key: str) -> None:
        self._path = cache_dir() / "compiled" / f"{key}.json"
        self.variants: dict[str, KnownVariant] = {}
        self.searched: list[str] = []
        with suppress(OSError, ValueError, KeyError, TypeError):
            self._read(json.loads(read_file(self._path)))
            os.utime(self._path)

    def _read(self, entry: dict[str, Any]) -> None:
        if entry["version"] != _VERSION:
            return
        found = {}
        for name, fields in entry["variants"].items():
            names = fields["saved"]["names"]
            saved = SavedSet(**fields["saved"] | {"names": None if names is None else tuple(names)})
            memory = VariantMemory(**fields["memory"])
            step_ms, error, code_ms = (float(fields[field]) for field in ("step_ms", "error", "code_ms"))
            found[name] = KnownVariant(saved, memory, step_ms, error, code_ms, str(fields["refused"]))
        self.variants, self.searched = found, [str(digest) for digest in entry["searched"]]

    def keep(self, variants: dict[str, KnownVariant], searched: str) -> None:
        """Write them for later runs; where that is not possible, later runs search anew."""
        if variants == self.variants and searched in ("", *self.searched):
            return
        self.variants = variants
        self.searched = [*self.searched, *([searched] if searched else [])][-_MOST_SEARCHES:]
        entry = {
            "version": _VERSION,
            "variants": {name: asdict(variant) for name, variant in variants.items()},
            "searched": self.searched,
        }
        with suppress(OSError):
            write_file(self._path, json.dumps(entry).encode())
            keep_newest(self._path.parent, _MOST_FILES)


def layer_digest(graph: fx.Graph, *facts: object) -> str:
    """Equal where the same variants of a layer take the same bytes.

    Args:
        graph: Joint graph of forward and backward.
        facts: Its device and settings.
    """
    lines = [repr((__version__, torch.__version__, *facts))]
    for node in graph.nodes:
        value = node.meta.get("val")
        parts = value if isinstance(value, (tuple, list)) else [value]
        looks = [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in parts if isinstance(t, torch.Tensor)]
        lines.append(f"{node.format_node()} {looks}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
