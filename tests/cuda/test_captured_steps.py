"""Steps that a CUDA graph captures: the graph runs the ops of one step again and again, and lowtide stays out of it."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.training import fitted_call

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this PyTorch has no CUDA device: make test-cuda makes one that needs no GPU"
)


@pytest.mark.parametrize("steps_aside", [True, False])
def test_a_captured_step_runs_as_without_lowtide_and_is_told(steps_aside, monkeypatch):
    """Seen by lowtide, its proofs and copies would be captured too, or end the capture."""
    if not steps_aside:
        monkeypatch.setattr(fitted_call, "is_captured", lambda device: False)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))).cuda()
    batch = torch.randn(512, 64, device="cuda")

    def step():
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    with lowtide.fit(model, budget="1GiB") as fit:
        for _ in range(2):  # PyTorch asks for a warm-up on another stream
            with torch.cuda.stream(torch.cuda.Stream()):
                step()
        fit.wait()
        with torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(batch)  # an evaluation, which no plan is for
        before, graph = fit.status(), torch.cuda.CUDAGraph()
        assert not any("captured" in reason for reason in before.reasons)
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        status = fit.status()
        told = [reason for reason in status.reasons if "captured in a CUDA graph" in reason]
        if steps_aside:
            assert len(told) == 1 and status.why_not == told[0]
            assert status.steps == before.steps
            step()  # and is planned again where nothing is captured
            assert fit.status().planned_steps == before.planned_steps + 1
        else:
            assert not told and status.steps > before.steps
