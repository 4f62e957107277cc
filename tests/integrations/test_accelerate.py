"""``lowtide.fit`` in loops written with Accelerate: nothing of its own is needed, and the bits stay the same."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.quick import thorough_but
from support.training_steps import is_clean
from support.watched_training import Layered, resident_bytes
from torch.utils.data import DataLoader

import lowtide
from lowtide.measurement.allocator import measuring

accelerate = pytest.importorskip("accelerate")

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

ROWS, NUM = 256, 6
DATA = torch.randn(NUM * ROWS, 64, generator=torch.Generator(torch.get_default_device()).manual_seed(1))


def loop(
    model, budget=None, *, before_prepare=False, precision="no", accumulates=1, saves_to=None, through_wrapper=True
):
    """An ordinary loop; (losses, each update's peak with what was resident, fit, the accelerator)."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True, gradient_accumulation_steps=accumulates)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fit = None
    if budget is not None and before_prepare:
        fit = lowtide.fit(model, budget=budget, optimizer=optimizer)
    prepared, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(DATA, batch_size=ROWS))
    if budget is not None and not before_prepare:
        fit = lowtide.fit(accelerator.unwrap_model(prepared), budget=budget, optimizer=optimizer)
    torch.manual_seed(3)
    losses, peaks = [], []
    for n, x in enumerate(data):
        if fit is not None and n == 2:
            fit.wait()
        if saves_to is not None and n == 4:
            accelerator.save_state(saves_to)
            for p in model.parameters():
                torch.nn.init.zeros_(p)
            accelerator.load_state(saves_to)
        state = [t for v in optimizer.state.values() for t in v.values()]
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        resident = resident_bytes(model) + sum(t.nbytes for t in (x, *state, *grads))
        with accelerator.accumulate(prepared):
            with measuring("cpu") as counter:
                y = prepared(x)
                with accelerator.autocast():
                    loss = F.mse_loss(torch.tanh(y @ y.T) @ x, x)
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(resident + counter.peak)
        losses.append(loss.item())
    return losses, peaks, fit, accelerator


CASES = {
    "after prepare": {},
    "before prepare": {"before_prepare": True},
    "bf16": {"precision": "bf16"},
    "bf16, before prepare": {"precision": "bf16", "before_prepare": True},
    "accumulated": {"accumulates": 2},
}


@pytest.mark.parametrize("case", thorough_but(("after prepare", "bf16, before prepare", "accumulated"), CASES))
def test_training_is_bitwise_the_same_within_the_budget_and_under_a_plan(case):
    torch.manual_seed(0)
    plain = Layered(6)
    model = copy.deepcopy(plain)
    expected, plain_peaks, _, _ = loop(plain, **{**CASES[case], "before_prepare": False})
    resident = 4 * resident_bytes(model)
    budget = int(resident + 0.75 * (max(plain_peaks) - resident))
    losses, peaks, fit, accelerator = loop(model, budget, **CASES[case])
    status = fit.status()

    assert losses == expected
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert status.steps == 6 and status.planned_steps in (4, 5), status  # the planner may answer before the second step
    assert fit.plan.counts["recompute"] > 0
    assert max(peaks[2:]) <= budget < max(plain_peaks), (peaks, budget)
    assert accelerator.unwrap_model(model) is model
    fit.remove()
    assert is_clean(model)


def test_saved_and_loaded_states_hold_nothing_of_lowtide_and_training_goes_on(tmp_path):
    torch.manual_seed(0)
    plain = Layered(6)
    model = copy.deepcopy(plain)
    expected, *_ = loop(plain, saves_to=tmp_path / "plain")
    losses, _, fit, _ = loop(model, "80%", saves_to=tmp_path / "ours")
    fit_status = fit.status()
    fit.remove()
    files = [sorted(p.relative_to(tmp_path / name) for p in (tmp_path / name).rglob("*")) for name in ("plain", "ours")]

    assert losses == expected
    assert fit_status.in_force and fit_status.planned_steps in (4, 5)
    assert files[0] == files[1]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "ours")]
    assert weights[0] == weights[1]
