"""The ablation benchmark: what it replaces is there, nothing stays replaced, and a worse plan does not pass."""

import inspect
import json

import ablation
import pytest

TARGETS = sorted({t for part in ablation.PARTS.values() for t in (*part.replaced, *part.reached)})


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_replaced_is_there_and_comes_back(target):
    owner, name = ablation.found_at(target)
    before = inspect.getattr_static(owner, name)

    with ablation.put(target, 7):
        assert getattr(owner, name) == 7

    assert inspect.getattr_static(owner, name) is before


def test_a_part_that_has_no_say_leaves_the_plan_and_is_not_searched_again():
    parts = ["guided", "rounding one model", "MILP of one model", "sharper"]
    plain = ablation.plain_line("unet", "36%", parts)

    lines = {part: ablation.part_line(part, "unet", "36%", plain) for part in parts}

    assert plain["reached"]["guided"] is None and not lines["guided"]["ran"]
    assert lines["guided"]["predicted_overhead"] == plain["predicted_overhead"]
    assert lines["rounding one model"]["predicted_overhead"] > plain["predicted_overhead"] + 0.01
    assert lines["sharper"]["predicted_overhead"] == plain["predicted_overhead"]
    assert lines["sharper"]["gap"] > plain["gap"] + 0.005


def line(overhead, cpu_s=1.0, case="unet"):
    return {
        "part": "none", "case": case, "budget": "50%", "status": "ok", "predicted_overhead": overhead, "cpu_s": cpu_s,
        "peak_bytes": 1, "fraction": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "status", "shown"),
    [
        (line(0.1), line(0.1005), 0, 0),
        (line(0.1), line(0.102), 1, 1),
        (line(0.102), line(0.1), 0, 1),
        (line(0.1), line(0.1, cpu_s=1.2), 0, 1),
        (line(0.1), line(0.1, cpu_s=0.95), 0, 0),
        (line(0.1), {**line(0.1), "status": "infeasible"} | {"predicted_overhead": None}, 1, 1),
    ],
)
def test_two_files_are_compared(old, new, status, shown, tmp_path, capsys):
    if new["predicted_overhead"] is None:
        del new["predicted_overhead"]
    for name, one in (("old", old), ("new", new)):
        (tmp_path / name).write_text(json.dumps(one) + "\n")

    found = ablation.compare(ablation.read(tmp_path / "old"), ablation.read(tmp_path / "new"))

    assert (found, len(capsys.readouterr().out.splitlines()) - 1) == (status, shown)
