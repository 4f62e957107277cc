"""Results of some cases replace those cases' lines in a file; the other lines stay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def replace_lines(out: Path, lines: Sequence[dict], *, by: str, order: Sequence[str]) -> None:
    """Write ``lines`` in place of those of the same cases, one JSON object a line, in the order of the cases.

    Args:
        by: The key that names a line's case.
        order: All cases; lines of others go.
    """
    old = [json.loads(text) for text in out.read_text().splitlines()] if out.exists() else []
    fresh = {line[by] for line in lines}
    every = [line for line in old if line[by] not in fresh and line[by] in order] + list(lines)
    every.sort(key=lambda line: (order.index(line[by]), line.get("rank", 0)))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(line) + "\n" for line in every))
