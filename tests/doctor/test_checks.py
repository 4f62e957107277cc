"""Each check speaks on a real reproduction, and is silent on the same set-up mended."""

from contextlib import nullcontext

import pytest
import torch
from support.sick_setups import ROWS, SICK, Case
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide.doctor import setup
from lowtide.doctor.registry import all_checks
from lowtide.doctor.setup import Setup


class Partly(nn.Module):
    """Of two layers and a parameter of its own, one layer reaches the loss."""

    def __init__(self):
        super().__init__()
        self.bias, self.layer, self.idle = nn.Parameter(torch.zeros(64)), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x)


@pytest.fixture(autouse=True)
def _one_group():
    torch.manual_seed(0)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def diagnosed(case: Case, code: str) -> lowtide.Diagnosis:
    fit = case.options.pop("fit", None)
    with case.around(), fit or nullcontext():
        return lowtide.diagnose(case.model, case.batch, case.step, only=[code], **case.options)


SLOW = pytest.mark.slow
# Mended by other code, not by a setting. LT203 has one where layers have flags.
NO_SETTING = {"LT001", "LT004", "LT009", "LT011", "LT102", "LT108", "LT203", "LT207", "LT302", "LT305", "LT307"}


@pytest.mark.parametrize("name", SICK)
def test_a_check_speaks_on_what_is_wrong_and_is_silent_on_what_is_mended(name):
    code = name.split()[0]
    sick, mended = SICK[name]

    found = diagnosed(sick(), code)
    assert found.codes == (code,) and not found.notes, found
    assert found[0].evidence and found[0].mend
    assert bool(found[0].fix) == (code not in NO_SETTING)
    compile(found[0].fix, code, "exec")

    healthy = diagnosed(mended(), code)
    assert not healthy and not healthy.notes, healthy


def test_what_gets_no_gradient_is_frozen_by_the_fix_and_nothing_else():
    model = Partly()

    (found,) = lowtide.diagnose(model, ROWS, only=["LT006"])
    exec(found.fix, {"model": model})

    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {"bias", "idle.weight", "idle.bias"}
    assert not lowtide.diagnose(model, ROWS, only=["LT006"])


def test_a_look_at_what_trl_does_leaves_checkpointing_as_it_is_set():
    case = SICK["LT110"][0]()
    before = [(dict(vars(m)), list(m._forward_hooks)) for m in case.model.modules()]

    assert diagnosed(case, "LT110")

    assert before == [(dict(vars(m)), list(m._forward_hooks)) for m in case.model.modules()]


def _by_work(fn, calls, device, now):
    with FlopCounterMode(display=False) as counter:
        fn()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("code", "less_memory"),
    [
        ("LT107", False),
        ("LT201", False),
        ("LT101", True),
        pytest.param("LT103", None, marks=SLOW),
        pytest.param("LT210", True, marks=SLOW),
    ],
)
def test_what_a_mend_gains_is_measured_on_the_step(code, less_memory, monkeypatch):
    monkeypatch.setattr(setup, "calls_ms", _by_work)  # a clock that no neighbour slows down

    (found,) = diagnosed(SICK[code][0](), code)

    if less_memory is None:
        assert found.gain_ms > 0 > found.gain_bytes, found  # what is recomputed for nothing is stored instead
    elif less_memory:
        assert found.gain_bytes > 0 and not (found.gain_ms or 0) > 0, found
    else:
        assert found.gain_ms > 0, found
    assert "of the peak" in found.gain or "ms a step" in found.gain


@pytest.mark.parametrize(("last_turn", "gained"), [((11, 11), None), ((11, 10), 2)])
def test_time_is_a_gain_where_every_turn_says_so(last_turn, gained, monkeypatch):
    turns = [(9, 9), (10, 8), (12, 9), (10, 8), (9, 8), last_turn]  # without the mend, and with it
    clock = iter([ms for i, turn in enumerate(turns) for ms in (turn if i % 2 else reversed(turn))])
    monkeypatch.setattr(setup, "calls_ms", lambda *_: next(clock))
    case = SICK["LT201"][0]()

    assert Setup(case.model, case.batch).gain(nullcontext).ms == gained


def test_every_check_is_shown():
    assert all_checks().keys() == {name.split()[0] for name in SICK} | {"LT109"}  # tests/integrations/test_deepspeed.py
