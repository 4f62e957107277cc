"""A plan for reserved memory beside what CUDA's allocator reserves, where steps ran before the plan."""

import gc

import torch
from support.training_steps import mlp

import lowtide
from lowtide.hollow.kept_workspaces import are_given_back
from lowtide.training import reserved_memory

MIB = 2**20


def test_a_plan_after_other_steps_reserves_what_it_says(cuda, monkeypatch):
    """The BLAS library's workspaces lie behind activations of the first step: they are taken anew under the plan."""
    given_back, give_back = [], reserved_memory.give_back_workspaces

    def give_back_and_note(device):
        before = torch.cuda.memory_allocated()
        give_back(device)
        given_back.append(before - torch.cuda.memory_allocated())

    monkeypatch.setattr(reserved_memory, "give_back_workspaces", give_back_and_note)
    give_back(cuda)  # those of streams that other tests used
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model, batch = mlp(8, 256).to(cuda), torch.randn(8192, 256, device=cuda)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.cuda.reset_peak_memory_stats()
    step()
    budget = int(0.8 * torch.cuda.max_memory_reserved())
    with lowtide.fit(model, budget=budget, budget_kind="reserved", optimizer=optimizer) as fit:
        step()
        fit.wait()
        torch.cuda.empty_cache()  # else the statistic begins with what the step without a plan has reserved
        torch.cuda.reset_peak_memory_stats()
        step()
        step()
        reserved, foreseen = torch.cuda.max_memory_reserved(), fit.plan.predicted_reserved_peak_bytes
        assert fit.status().planned_steps == 2

    step()
    taken = torch.cuda.memory_allocated()
    give_back(cuda)
    taken -= torch.cuda.memory_allocated()
    assert given_back == [0 if are_given_back() else taken]
    assert taken or are_given_back()
    assert reserved <= min(budget, foreseen + 2 * MIB)
