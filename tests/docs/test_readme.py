"""What README shows is what happens."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/offload.md"])
def test_every_python_block_runs_and_prints_what_it_says(capsys, page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})
        expected = re.findall(r"^print\(.*\)\s+# (.*)$", block, re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == expected


def test_the_tree_names_every_part_of_the_package():
    (tree,) = re.findall(r"^    src/lowtide/\n((?:      .*\n)+)", README, re.MULTILINE)
    named = [line.split()[0].rstrip("/") for line in tree.splitlines()]
    there = {p.name for p in (ROOT / "src/lowtide").iterdir() if not p.name.startswith("_")} - {"py.typed"}

    assert sorted([*named, "errors.py", "units.py"]) == sorted(there)
