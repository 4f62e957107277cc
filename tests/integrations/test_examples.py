"""The scripts in ``examples/`` run, and end with what was gained."""

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lowtide

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
ON_A_DEVICE = sorted(FOLDER.glob("torchtitan/*.py"))  # torchtitan has no CPU


QUICK = {"plain_loop"}


@pytest.mark.parametrize(
    "script",
    [pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else [pytest.mark.thorough]) for path in EXAMPLES],
)
def test_an_example_ends_with_a_lower_peak(script, tmp_path):
    # A folder of its own: what a killed run of DeepSpeed leaves in the usual one makes the next wait for ever.
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path), "LOWTIDE_CACHE_DIR": str(tmp_path / "plans")}
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=400, cwd=tmp_path, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = re.fullmatch(r"peak ([\d.]+) MiB -> ([\d.]+) MiB, .+", ran.stdout.splitlines()[-1])
    assert found is not None, ran.stdout[-2000:]
    assert float(found[2]) < 0.95 * float(found[1])
    assert not re.search(r"\b0 of \d+ steps ran under a plan", ran.stdout + ran.stderr)


def is_there(module, name):
    """Without importing it: a module of that name, or one that defines it."""
    if importlib.util.find_spec(f"{module}.{name}" if module == "lowtide.integrations" else module) is None:
        return False
    source = Path(importlib.util.find_spec(module).origin).read_text()
    return module == "lowtide.integrations" or bool(re.search(rf"^(def|class) {name}\b|^{name} = ", source, re.M))


@pytest.mark.parametrize("script", EXAMPLES + ON_A_DEVICE, ids=lambda path: path.stem)
def test_an_example_calls_what_there_is(script):
    """Names of lowtide, and the arguments that they are given; running the example takes ten seconds."""
    nodes = [*ast.walk(ast.parse(script.read_text()))]
    imported = [n for n in nodes if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("lowtide.")]
    for node in imported:
        assert all(is_there(node.module, alias.name) for alias in node.names), ast.unparse(node)
    if not any(isinstance(n, ast.Import) and n.names[0].name == "lowtide" for n in nodes):
        assert imported or "lowtide.cli" in script.read_text()
        return
    named = {n: n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "lowtide"}
    assert named and all(hasattr(lowtide, name) for name in named.values())
    for node in nodes:
        if isinstance(node, ast.Call) and node.func in named:
            words = {word.arg: word for word in node.keywords if word.arg is not None}
            inspect.signature(getattr(lowtide, named[node.func])).bind_partial(*node.args, **words)
