"""What the pages show is what happens; what they name is there."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A block after this mark goes on where the block before it ended.
CONTINUES = "<!-- continues -->\n"
BLOCK = re.compile(rf"({CONTINUES})?```python\n(.*?)```", re.DOTALL)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=name)
def test_every_python_block_runs_and_prints_what_it_says(capsys, monkeypatch, page):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # else DeepSpeed, which Accelerate imports, prints what it found
    namespace: dict = {}
    for goes_on, block in BLOCK.findall(page.read_text()):
        namespace = namespace if goes_on else {}
        exec(compile(block, name(page), "exec"), namespace)
        expected = re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == expected


COMMANDS = re.compile(r"```sh\n((?:lowtide .*\n)+)```")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, marks=pytest.mark.slow) if p.stem == "will-it-fit" else p  # plans of the largest models
        for p in PAGES
        if COMMANDS.search(p.read_text())
    ],
    ids=name,
)
def test_every_command_of_a_page_runs(capsys, monkeypatch, tmp_path, page):
    monkeypatch.chdir(tmp_path)
    commands = [line for block in COMMANDS.findall(page.read_text()) for line in block.splitlines()]
    for command in commands:
        code = cli.main([*shlex.split(command)[1:], "--json"])
        assert (command, code) == (command, 0), capsys.readouterr().err
    assert len(commands) > 5


def test_enough_blocks_are_found():
    assert sum(len(BLOCK.findall(page.read_text())) for page in PAGES) >= 10


def test_the_readme_is_short_and_its_tree_names_every_part_of_the_package():
    readme = (ROOT / "README.md").read_text()
    (tree,) = re.findall(r"^    src/lowtide/\n((?:      .*\n)+)", readme, re.MULTILINE)
    entries = re.findall(r"^ +((?:[a-z_]+(?:/|\.py)(?: +|$))+)", tree, re.MULTILINE)
    named = [name.rstrip("/") for name in " ".join(entries).split()]
    there = {p.name for p in (ROOT / "src/lowtide").iterdir() if not p.name.startswith("_")} - {"py.typed"}

    assert sorted(named) == sorted(there)
    assert len(readme.splitlines()) <= 90


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_file_that_a_page_names_exists(page):
    """Links, and paths like ``solvers/exact.py`` or ``tests/test_structure.py`` in code marks."""
    text = page.read_text()
    linked = [page.parent / target.split("#")[0] for target in re.findall(r"\]\((?!https?://|#)([^)\s]+)\)", text)]
    paths = [path for path in re.findall(r"`([\w/.*]+\.(?:py|jsonl|json|md))`", text) if "/" in path]
    roots = (ROOT, ROOT / "src/lowtide", page.parent)

    missing = [str(target) for target in linked if not target.exists()]
    missing += [path for path in paths if not any(list(root.glob(path)) for root in roots)]
    assert missing == []


def test_the_site_builds_without_a_warning(tmp_path):
    if shutil.which("mkdocs", path=str(Path(sys.executable).parent)) is None:
        pytest.fail("mkdocs is not installed: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert built.returncode == 0, built.stdout + built.stderr
    assert "BudgetInfeasibleError" in (tmp_path / "reference" / "index.html").read_text()
