"""The search for a plan of compiled layers: what is worth compiling."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lowtide.compiled import step_plan
from lowtide.compiled.captured_layer import Variant
from lowtide.compiled.choice import Choice
from lowtide.compiled.layer_calls import PLAIN
from lowtide.compiled.saved_sets import SavedSet
from lowtide.compiled.step_plan import _BELIEF_ERROR_OF_EXTRA, StepPlanner, _believed_ms, _expected_ms


def is_worth(monkeypatch, name, layers_ms, ready_ms):
    """Of a choice of one layer's variant: "ready" is compiled, "read" is not, and "proposed" has no code."""
    variants = {"ready": SimpleNamespace(is_tried=True), "read": SimpleNamespace(is_tried=False)}
    planner = object.__new__(StepPlanner)
    planner.moments, planner.shapes = [], {"0": SimpleNamespace(variants=variants, proposed={"proposed": None})}
    monkeypatch.setattr(planner, "_options", lambda *, ready: {"0": ready}, raising=False)
    found = None if ready_ms is None else Choice({"0": "ready"}, 0, ready_ms)
    monkeypatch.setattr(step_plan, "fastest_within", lambda moments, options, limit: options["0"] and found)
    return planner._is_worth(Choice({"0": name}, 0, layers_ms), 0)


@pytest.mark.parametrize("name", ["read", "proposed"])
def test_a_choice_that_is_believed_to_be_hardly_faster_is_not_compiled(monkeypatch, name):
    assert not is_worth(monkeypatch, name, 99.9, 100.0)
    assert is_worth(monkeypatch, name, 99.7, 100.0)
    assert is_worth(monkeypatch, name, 120.0, None), "nothing else fits"


def test_a_choice_of_compiled_variants_is_gone_on_from(monkeypatch):
    assert is_worth(monkeypatch, "ready", 100.0, 100.0)


@pytest.mark.parametrize("is_priced", [True, False], ids=["priced", "unpriced"])
def test_the_largest_of_pytorchs_sets_that_fits_all_layers_is_tried(monkeypatch, is_priced):
    """By its code "0.7" takes more than it looked like, and "0.5" has other bits: "0.3" is what is left."""
    bytes_of = {"0.3": 30, "0.5": 50, "0.7": 60}
    done: list[tuple[str, bool]] = []
    refused: set[str] = set()
    shape = SimpleNamespace(
        variants={"plain": SimpleNamespace(code_ms=1.0 if is_priced else 0.0)},
        pytorchs=list(bytes_of),
        name_of=lambda saved: "" if saved in refused else saved,
    )
    planner = object.__new__(StepPlanner)
    planner.moments, planner.shapes, planner._distinct = [], {"0": shape, "1": shape}, [shape]
    monkeypatch.setattr(planner, "_options", dict, raising=False)
    monkeypatch.setattr(step_plan, "peak_of", lambda moments, options, variants: bytes_of[variants["1"]])

    def advance(choice, *, kernels, times):
        (name,) = set(choice.variants.values())
        assert not times, "each timing runs the plain variant as well: this one waits for the next"
        if (name, kernels) in done:
            return False
        done.append((name, kernels))
        bytes_of["0.7"] = 80
        if name == "0.5":
            refused.add(name)
        return True

    monkeypatch.setattr(planner, "_advance", advance)
    planner._try_pytorchs(65)
    assert done == [(name, not is_priced) for name in ("0.7", "0.5", "0.3")]


class Hashable(SimpleNamespace):
    __hash__ = object.__hash__


def test_what_pytorch_saves_is_timed_beside_what_is_compiled_next(monkeypatch):
    variants = {PLAIN: variant(PLAIN, 0.0, step_ms=1.0), "theirs": variant("theirs", 1.0), "ours": variant("ours", 2.0)}
    compiled = SimpleNamespace(compiled=lambda read: replace(read, run=print))
    shape = Hashable(variants=variants, captured=compiled, whole=False)
    planner = object.__new__(StepPlanner)
    planner._distinct, planner.refused = [shape], []
    timed: list[list[str]] = []
    monkeypatch.setattr(step_plan, "why_not_equal", lambda captured, made, plain: [""] * len(made))
    monkeypatch.setattr(step_plan, "measure_ms", lambda captured, plain, others: timed.append([v.name for v in others]))
    planner._compile([(shape, "theirs")], times=False)
    planner._compile([(shape, "ours")])
    assert timed == [["theirs", "ours"]]


def test_what_waited_to_be_timed_beside_others_is_timed_where_none_come(monkeypatch):
    shape = SimpleNamespace(variants={PLAIN: None, "theirs": None}, make_least=lambda: None, propose_front=lambda: None)
    planner = object.__new__(StepPlanner)
    planner.moments, planner._distinct = [], [shape]
    timed: list[list[str]] = []
    monkeypatch.setattr(step_plan, "fastest_within", lambda *_: Choice({}, 0, 0.0))
    for name, found in (("_try_pytorchs", None), ("_options", {}), ("_is_worth", False)):
        monkeypatch.setattr(planner, name, lambda *_, found=found: found, raising=False)
    monkeypatch.setattr(planner, "_time", lambda shape, names: timed.append(names), raising=False)
    planner._prepare_layers(0)
    assert timed == [[PLAIN, "theirs"]]


def variant(name, recompute_ms, *, code_ms=0.0, step_ms=0.0):
    return Variant(name, SavedSet((name,), 0, 0, 0, recompute_ms), None, step_ms=step_ms, code_ms=code_ms)


def test_code_that_has_been_read_is_believed_before_the_sum_of_ops():
    plain = variant("plain", 0.0, code_ms=10.0, step_ms=12.0)
    ran = variant("ran", 4.0, code_ms=11.0, step_ms=14.0)
    read, unread = variant("read", 4.0, code_ms=10.5), variant("unread", 2.0)
    shape = SimpleNamespace(variants={v.name: v for v in (plain, ran, read)})

    assert _believed_ms(shape, read.saved, read.code_ms) == 12.0 + 0.5 * 2.0, "what ran took twice what its code said"
    assert _believed_ms(shape, unread.saved) == 12.0 + 2.0 * 2.0 / 4.0, "and half of what its ops add up to"
    shape.variants.pop("ran")
    assert _believed_ms(shape, read.saved, read.code_ms) == 12.5 and _believed_ms(shape, unread.saved) == 14.0


def test_one_variant_that_was_measured_as_too_fast_makes_no_other_one_free():
    plain = variant("plain", 0.0, step_ms=10.0)
    ran = [variant(f"ran {ms}", ms, step_ms=10.0 + took) for ms, took in ((1.0, 1.0), (2.0, -0.5), (4.0, 3.0))]
    shape = SimpleNamespace(variants={v.name: v for v in (plain, *ran)})

    believed = [_believed_ms(shape, variant("unread", ms).saved) for ms in (0.5, 1.5, 2.0, 3.0, 8.0)]

    assert believed == [10.125, 10.25, 10.25, 11.625, 16.0]


def test_what_was_measured_as_dear_makes_no_unread_variant_dearer_than_its_ops_alone():
    plain = variant("plain", 0.0, code_ms=10.0, step_ms=10.0)
    ran = variant("ran", 4.0, code_ms=11.0, step_ms=18.0)  # twice what its ops add up to: the machine was busy
    shape = SimpleNamespace(variants={v.name: v for v in (plain, ran)})

    assert _believed_ms(shape, variant("unread", 2.0).saved) == 12.0
    assert _believed_ms(shape, variant("read", 2.0).saved, 10.5) == 14.0, "its code was read, so that is no bound"


def test_a_lucky_time_counts_by_its_error():
    plain = variant("plain", 0.0, step_ms=10.0)
    lucky, again = variant("lucky", 2.0, step_ms=9.0), variant("again", 4.0, step_ms=14.0)
    shape = SimpleNamespace(variants={v.name: v for v in (plain, lucky, again)})

    assert _expected_ms(shape, lucky) == 9.0, "nothing says that it is off"
    lucky.error = _BELIEF_ERROR_OF_EXTRA * 2.0 / lucky.step_ms  # as far off as beliefs are
    assert _expected_ms(shape, lucky) == pytest.approx((9.0 + 12.0) / 2)
    lucky.error *= 3
    assert _expected_ms(shape, lucky) == pytest.approx(12.0 - 3.0 / 10)
    shape.variants.pop("again")
    assert _expected_ms(shape, lucky) == 9.0, "there is nothing else to go by"


def test_a_time_that_is_known_well_counts_more_than_its_neighbour():
    plain = variant("plain", 0.0, step_ms=10.0)
    known, guessed = variant("known", 2.0, step_ms=12.0), variant("guessed", 4.0, step_ms=9.0)
    shape = SimpleNamespace(variants={v.name: v for v in (plain, known, guessed)})

    known.error, guessed.error = 0.01, 0.03
    assert _believed_ms(shape, variant("unread", 8.0).saved) == pytest.approx(10.0 + 2.0 * (0.9 * 2.0 - 0.1 * 1.0))


def test_what_has_run_may_take_longer_than_its_ops_add_up_to():
    plain, again = variant("plain", 0.0, step_ms=10.0), variant("again", 4.0, step_ms=16.0)
    lucky = variant("lucky", 2.0, step_ms=10.0)
    lucky.error = 100.0  # nothing is known of it
    shape = SimpleNamespace(variants={v.name: v for v in (plain, again, lucky)})

    assert _expected_ms(shape, lucky) == pytest.approx(13.0, abs=0.01)


def test_more_work_is_never_believed_to_save_time():
    plain, faster = variant("plain", 0.0, step_ms=10.0), variant("faster", 4.0, step_ms=8.0)
    lucky = variant("lucky", 2.0, step_ms=5.0)
    lucky.error = 100.0  # nothing is known of it
    shape = SimpleNamespace(variants={v.name: v for v in (plain, faster, lucky)})

    assert _expected_ms(shape, lucky) == pytest.approx(10.0, abs=0.01), "as the plain one, not less"
