"""What ``make test`` leaves out is in a part of ``make test-all``; the slowest tests are written into their page."""

import importlib.util
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from _pytest.mark.expression import Expression
from support import memory_growth, quick, slowest

ROOT = Path(__file__).parents[1]
MARKS = ("accelerator", "slow", "thorough")


@pytest.fixture(scope="module")
def parts():
    spec = importlib.util.spec_from_file_location("parts", ROOT / ".ci" / "parts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def holds(part, folder, marks):
    """Whether it runs tests of this folder with these marks."""
    if "pytest" not in part.command:  # in an environment of its own
        return False
    _, *arguments = part.command[part.command.index("pytest") :]
    expression = Expression.compile(arguments[arguments.index("-m") + 1])
    named = [a for a in arguments if a.startswith("tests/")]
    ignored = [a.partition("=")[2] for a in arguments if a.startswith("--ignore=")]
    if "--device" in arguments or folder in ignored or (named and folder not in named):
        return False
    # Where it is not asked for alone, a test of the accelerator does not run (conftest.py).
    alone = "accelerator" in arguments[arguments.index("-m") + 1]
    return ("accelerator" not in marks or alone) and expression.evaluate(lambda name: name in marks)


def test_every_test_is_in_a_part(parts):
    folders = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").iterdir() if p.is_dir())
    for folder, which in product(folders, product((False, True), repeat=len(MARKS))):
        marks = [mark for mark, yes in zip(MARKS, which) if yes]
        assert any(holds(part, folder, marks) for part in parts.PARTS), (folder, marks)
    assert not holds(parts.PARTS[0], "tests/solvers", ["thorough"])


def test_the_folders_of_parts_are_there(parts):
    named = [a for part in parts.PARTS for a in part.command if a.startswith("tests/")]
    assert len(named) > 20 and all((ROOT / name).exists() for name in named)


def fake(monkeypatch, parts, found):
    ran = []
    monkeypatch.setattr(parts, "run", lambda part, counts: ran.append(part.label) or found.get(part.label, 0))
    return ran


def test_what_does_not_fit_is_named_and_the_quick_tests_always_run(parts, monkeypatch, capsys):
    ran = fake(monkeypatch, parts, {})
    assert parts.main(["--quick", "--within", "9", "--used", "360"]) == 0

    *told, last = capsys.readouterr().out.splitlines()
    assert ran[:2] == [parts.QUICK.label, parts.PARTS[0].label] and 6 + parts.PARTS[0].minutes < 9
    left_out = [part for part in parts.PARTS if part.label not in ran]
    assert [line for line in told if "left out" in line] == [
        f"left out: {part.label} (some {part.minutes:g} minutes)" for part in left_out
    ]
    assert all(6 + part.minutes >= 9 for part in left_out) and 0 < len(left_out) < len(parts.PARTS)
    assert last.startswith("no tests ran in 36")


def test_on_a_slower_machine_less_fits(parts, monkeypatch):
    ran, clock = [], SimpleNamespace(now=0.0)

    def twice_as_long(part, counts):
        ran.append(part.label)
        clock.now += 2 * part.minutes * 60
        return 0

    monkeypatch.setattr(parts, "run", twice_as_long)
    monkeypatch.setattr(parts.time, "monotonic", lambda: clock.now)
    assert parts.main(["--quick", "--within", "60"]) == 0

    assert clock.now <= 60 * 60 and len(ran) > 3


def test_a_part_that_fails_ends_the_run_with_its_status(parts, monkeypatch):
    ran = fake(monkeypatch, parts, {parts.PARTS[1].label: 3})

    assert parts.main([]) == 3 and ran == [part.label for part in parts.PARTS[:2]]


def test_a_part_is_counted_from_what_pytest_prints(parts):
    counts = Counter()
    lines = (
        "1 failed, 4 passed, 2 skipped, 7 deselected, 1 warning in 3.10s",
        "3 passed in 61.00s (0:01:01)",
        "5 passed in a test",
    )
    status = parts.run(parts.Part("", 0, ("sh", "-c", 'printf "%s\\n" "$@"; exit 1', "", *lines)), counts)

    assert status == 1
    assert parts.summary(counts, 70) == "1 failed, 7 passed, 2 skipped, 1 warning in 70.00s"


def test_quick_leaves_out_what_is_marked(monkeypatch):
    monkeypatch.setenv("LOWTIDE_QUICK_TESTS", "")
    for given, expected in (("", "not slow and not thorough"), ("a or b", "(a or b) and not slow and not thorough")):
        config = SimpleNamespace(option=SimpleNamespace(markexpr=given), getoption=lambda name: True)
        quick.choose(config)
        assert config.option.markexpr == expected
    assert quick.is_quick() and quick.examples(100) == 25 and quick.examples(20) == 10

    quick.choose(SimpleNamespace(option=SimpleNamespace(markexpr="slow"), getoption=lambda name: False))
    assert not quick.is_quick() and quick.examples(100) == 100


def test_all_but_the_quick_parameters_are_thorough():
    one, other = quick.thorough_but(("b",), ("a", "b"))
    assert one == "b" and other.values == ("a",) and [mark.name for mark in other.marks] == ["thorough"]
    assert quick.thorough_but([], [("a", 1)])[0].values == ("a", 1)


def test_the_slowest_tests_replace_those_of_the_last_report(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"above\n{slowest.BEGIN}old\n{slowest.END}below\n")
    report = slowest.SlowestTests(str(page))
    for test, seconds in (("tests/a.py::test_b[1]", 2.0), ("tests/a.py::test_b[2]", 3.0), ("tests/c.py::test_d", 1.0)):
        for when, duration in (("call", seconds), ("teardown", 0.0)):
            properties = [("processor seconds", -1.0), ("processor seconds", 1.5), ("peak of the process", 700)]
            report.pytest_runtest_logreport(
                SimpleNamespace(nodeid=test, when=when, duration=duration, user_properties=properties)
            )

    text = slowest.replaced(page.read_text(), report.table())

    assert text.startswith("above\n") and text.endswith("below\n") and "old" not in text
    assert "| 5.0 | 1.0 | 2 | a.py test_b |\n| 1.0 | 0.5 | 1 | c.py test_d |" in text
    assert "3 tests took 0.1 minutes" in text and "had 700 MiB" in text
    with pytest.raises(pytest.UsageError, match="the page has no lines"):
        slowest.replaced("nothing here", "")


def test_a_test_at_which_a_worker_grew_is_listed_below_that_worker(monkeypatch):
    peaks = iter([300, 10, 305, 10, 450, 20])  # of the process and of its children, after each test
    monkeypatch.setattr(memory_growth, "_peak_mib", lambda who: 300)
    growth = memory_growth.MemoryGrowth(least_mib=50)
    monkeypatch.setattr(memory_growth, "_peak_mib", lambda who: next(peaks))
    for worker, test in (("gw1", "t.py::test_a"), ("gw0", "t.py::test_b"), ("gw1", "t.py::test_c")):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        report = SimpleNamespace(when="teardown", user_properties=[])
        hook = growth.pytest_runtest_makereport(SimpleNamespace(nodeid=test), SimpleNamespace(when="teardown"))
        next(hook)
        with pytest.raises(StopIteration):
            hook.send(report)
        growth.pytest_runtest_logreport(report)

    assert growth.lines() == [
        "gw0: 305 MiB; its largest child 10 MiB; 1 tests",
        "gw1: 450 MiB; its largest child 20 MiB; 2 tests",
        "  + 145 to  450  t.py::test_c",
    ]
