"""Run a notebook's cells in order, in one namespace, and write what they show into it.

python benchmarks/run_notebook.py examples/first_budget.ipynb

A cell may print, and its last expression is shown, by its HTML form where it has one. No magics.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import sys
from pathlib import Path


def executed(notebook: dict) -> dict:
    """``notebook`` with the outputs of a run in this process."""
    namespace: dict = {}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell = {**cell, "execution_count": count, "outputs": _run("".join(cell["source"]), namespace, count)}
        cells.append(cell)
    return {**notebook, "cells": cells}


def _run(source: str, namespace: dict, count: int) -> list[dict]:
    body = ast.parse(source).body
    last = body.pop().value if body and isinstance(body[-1], ast.Expr) else None
    printed, shown = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), f"cell {count}", "exec"), namespace)
        if last is not None:
            shown = eval(compile(ast.Expression(last), f"cell {count}", "eval"), namespace)
    outputs: list[dict] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    if shown is not None:
        data = {"text/plain": [re.sub(r" at 0x\w+", "", repr(shown))]}
        if hasattr(shown, "_repr_html_"):
            data["text/html"] = [shown._repr_html_()]
        result = {"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data}
        outputs.append(result)
    return outputs


def main() -> int:
    (path,) = map(Path, sys.argv[1:])
    path.write_text(json.dumps(executed(json.loads(path.read_text())), indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
