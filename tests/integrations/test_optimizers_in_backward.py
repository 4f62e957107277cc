"""Optimizers of libraries that step while backward runs: LOMO, torchtune's wrapper, layer by layer in the Trainer.

Each is bitwise the training without lowtide, and within its budget in every step.
"""

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from step_probe import resident_bytes
from support.trainers import llama, padded, sentences, train
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import lowtide
from lowtide.integrations.transformers import LowtideCallback
from lowtide.measurement.allocator import measuring
from lowtide.step.optimizer_state import existing_state_bytes

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
STEPS = 6
Step = Callable[[torch.Tensor], None]  # backward of a loss, and what the recipe does with it


def library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{error}")


def lomo(model: nn.Module) -> tuple[Step, Callable[[], Any]]:
    """As LOMO's trainer: one call for backward and step, which ends with the last parameter's."""
    optimizer = library("lomo_optim").Lomo(model, lr=1e-2)

    def step(loss: torch.Tensor) -> None:
        optimizer.fused_backward(loss, 1e-2)

    return step, lambda: []


def in_backward_of_torchtune() -> Any:
    """``torchtune.training.memory`` without the package's own imports, which want a torchao of an older PyTorch."""
    found = importlib.util.find_spec("torchtune")
    if found is None or not found.submodule_search_locations:
        pytest.skip("torchtune is not installed")
    (folder,) = found.submodule_search_locations
    with pytest.MonkeyPatch.context() as patch:
        for name in ("torchtune", "torchtune.training"):
            package = ModuleType(name)
            package.__path__ = [str(Path(folder, *name.split(".")[1:]))]
            patch.setitem(sys.modules, name, package)
        return library("torchtune.training.memory")


def torchtune(model: nn.Module) -> tuple[Step, Callable[[], Any]]:
    """As torchtune's recipes with ``optimizer_in_bwd=True``, the scheduler included."""
    training = in_backward_of_torchtune()
    optimizers = {p: torch.optim.AdamW([p], lr=1e-3, fused=True) for p in model.parameters()}
    training.register_optim_in_bwd_hooks(model=model, optim_dict=optimizers)
    wrapper = training.create_optim_in_bwd_wrapper(model=model, optim_dict=optimizers)
    first = next(iter(wrapper.optim_map.values()))
    wrapper.set_lr_scheduler(torch.optim.lr_scheduler.StepLR(first, 2))

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        wrapper.step_lr_scheduler()

    return step, lambda: [o.state[p] for p, o in optimizers.items() if p in o.state]


def run(recipe: Any, budget: int | None = None) -> tuple[list[torch.Tensor], nn.Module, list[int], list[int], Any]:
    model = llama()
    step, state_of = recipe(model)
    batches = [padded(sentences()[4 * i % 16 : 4 * i % 16 + 4]) for i in range(STEPS)]
    fit = None if budget is None else lowtide.fit(model, budget=budget)
    losses, peaks, there = [], [], []
    torch.manual_seed(0)
    for batch in batches:
        gc.collect()
        there.append(resident_bytes(model, (batch, list(_tensors(state_of())))))
        with measuring("cpu") as counter:
            loss = model(**batch).loss
            step(loss)
            losses.append(loss.detach().clone())
            del loss
        peaks.append(there[-1] + counter.peak)
        if fit is not None:
            fit.wait()
    status = None
    if fit is not None:
        status = fit.status()
        fit.remove()
    return losses, model, peaks, there, status


def _tensors(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, (list, dict)):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _tensors(value)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [lomo, torchtune])
def test_a_recipe_is_bitwise_and_within_its_budget(recipe):
    losses, plain, peaks, there, _ = run(recipe)
    budget = max(there) + int(0.6 * (max(peaks) - max(there)))

    found, ours, taken, _, status = run(recipe, budget)

    assert all(map(torch.equal, losses, found)) and len(set(map(float, found))) > 1
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))
    assert max(taken) <= budget < max(peaks)
    assert status.planned_steps >= STEPS - 2 and not status.over_budget_steps, status.reasons


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["theirs", None])
@pytest.mark.parametrize("name", ["galore", "apollo"])
def test_layer_by_layer_in_the_trainer(name, optimizer, tmp_path):
    library(f"{name}_torch")
    projection = ", proj=random, scale_type=channel" if name == "apollo" else ""
    settings = dict(
        optim=f"{name}_adamw_layerwise", optim_target_modules=["self_attn", "mlp"], max_steps=STEPS,
        optim_args=f"rank=4, update_proj_gap=2, scale=1.0{projection}",
    )  # fmt: skip
    plain = train(llama(), tmp_path, **settings)
    budget = plain.budget(0.6)
    callback = LowtideCallback(budget, **({} if optimizer == "theirs" else {"optimizer": None}))

    optimizers_seen = set()
    seen = register_optimizer_step_post_hook(lambda optimizer, *_: optimizers_seen.add(optimizer))
    ours = train(llama(), tmp_path, callback, **settings)
    seen.remove()

    status = callback.fit.status()
    assert ours.same_as(plain)
    # A watched step knows nothing of what the optimizer makes within it: a few tensors.
    assert max(ours.peaks) <= budget + 0.01 * (budget - max(ours.resident)) < max(plain.peaks)
    assert max(peak for peak, planned in zip(ours.peaks, ours.planned) if planned) <= budget
    state = sum(existing_state_bytes(o) for o in optimizers_seen)
    assert callback.fit.graph.resident["optimizer"] == state > 0
    assert status.planned_steps >= STEPS - 2 and status.over_budget_steps <= STEPS - status.planned_steps
