"""What the pages show is what happens; what they name is there."""

import doctest
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# "continues": the block goes on where the one before it ended. "slow": it runs in `make test-all` only.
MARKS = r"(<!-- (?:continues|slow) -->\n)?"
# What a block prints stands in a block of text after it, or behind its calls of print; "..." is any text.
TEXT = r"(?:\n+```text\n(.*?)```)?"
BLOCK = re.compile(rf"{MARKS}```python\n(.*?)```{TEXT}", re.DOTALL)
SELDOM = ("offload",)  # its steps move hundreds of MiB; tests/tape/offload has the same in small
COMMANDS = re.compile(rf"{MARKS}```sh\n((?:lowtide [^\n]*\n)+)```{TEXT}", re.DOTALL)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def pages_with(blocks: re.Pattern[str]) -> list:
    """Each page with such blocks; once more, marked slow, where some run in ``make test-all`` only."""
    found = sorted({(p, is_slow(p, mark)) for p in PAGES for mark, *_ in blocks.findall(p.read_text())})
    marks = {True: pytest.mark.slow, False: ()}
    return [
        pytest.param(p, slow, id=name(p), marks=pytest.mark.thorough if p.stem in SELDOM else marks[slow])
        for p, slow in found
    ]


def is_slow(page: Path, mark: str) -> bool:
    return "slow" in mark or page.stem == "will-it-fit"  # plans of the largest models


def assert_printed(printed: str, expected: str) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(expected, printed, flags), f"expected:\n{expected}\nprinted:\n{printed}"


def test_another_number_is_seen():
    assert_printed("peak 3 MiB of\n4 MiB\n", "peak ... MiB of 4 MiB\n")
    with pytest.raises(AssertionError, match="printed"):
        assert_printed("peak 3 MiB of 5 MiB\n", "peak ... MiB of 4 MiB\n")


@pytest.mark.parametrize(("page", "slow"), pages_with(BLOCK))
def test_every_python_block_runs_and_prints_what_it_says(capsys, monkeypatch, tmp_path, page, slow):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # else DeepSpeed, which Accelerate imports, prints what it found
    namespace: dict = {}
    for mark, block, text in BLOCK.findall(page.read_text()):
        if is_slow(page, mark) is slow:
            namespace = namespace if "continues" in mark else {}
            exec(compile(block, name(page), "exec"), namespace)
            said = re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE)
            assert_printed(capsys.readouterr().out, text or "".join(f"{line}\n" for line in said))


@pytest.mark.parametrize(("page", "slow"), pages_with(COMMANDS))
def test_every_command_of_a_page_runs(capsys, monkeypatch, tmp_path, page, slow):
    monkeypatch.chdir(tmp_path)
    for mark, block, text in COMMANDS.findall(page.read_text()):
        printed = ""
        for command in block.splitlines() if is_slow(page, mark) is slow else ():
            code = cli.main([*shlex.split(command)[1:], *(() if text else ("--json",))])
            captured = capsys.readouterr()
            assert (command, code) == (command, 0), captured.err
            printed += captured.out
        if printed and text:
            assert_printed(printed, text)


def test_enough_blocks_are_found():
    assert sum(len(BLOCK.findall(page.read_text())) for page in PAGES) >= 20
    assert sum(len(COMMANDS.findall(page.read_text())) for page in PAGES) >= 5


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()

    assert len(lines) <= 80


def test_the_tree_in_contributing_names_every_part_of_the_package():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (tree,) = re.findall(r"^    src/lowtide/\n((?:      .*\n)+)", page, re.MULTILINE)
    entries = re.findall(r"^ +((?:[a-z_]+(?:/|\.py)(?: +|$))+)", tree, re.MULTILINE)
    named = [name.rstrip("/") for name in " ".join(entries).split()]
    there = {p.name for p in (ROOT / "src/lowtide").iterdir() if not p.name.startswith("_")} - {"py.typed"}

    assert sorted(named) == sorted(there)


@pytest.mark.parametrize("page", sorted((ROOT / "docs/design").glob("*.md")), ids=name)
def test_a_page_of_the_design_is_read_in_one_sitting(page):
    assert len(page.read_text().split()) < 1500


def test_the_first_page_of_the_design_names_all_others():
    first = (ROOT / "docs/design/index.md").read_text()
    pages = {page.name for page in (ROOT / "docs/design").glob("*.md")} - {"index.md"}

    assert len(pages) > 10
    assert pages == set(re.findall(r"\]\(([\w-]+\.md)\)", first))


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


@pytest.mark.thorough
def test_the_site_builds_without_a_warning(tmp_path):
    if shutil.which("mkdocs", path=str(Path(sys.executable).parent)) is None:
        pytest.fail("mkdocs is not installed: pip install -e '.[docs]'")
    # Without --quiet, under which mkdocs counts no warning.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert built.returncode == 0, built.stdout + built.stderr
    assert "BudgetInfeasibleError" in (tmp_path / "reference" / "index.html").read_text()
