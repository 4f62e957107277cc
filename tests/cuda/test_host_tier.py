"""The host tier on CUDA's streams, which run as late as events allow: a wait that is missing gives other bits.

The waits are taken out one at a time, so each of these tests can fail.
"""

import inspect
import textwrap

import pytest
import torch
from support.offloads import movable, moving
from support.training_steps import differing, mlp, outcome, plain

import lowtide
from lowtide.tape.offload import host_tier
from lowtide.tracing.tracer import run_step

cuda_standin = pytest.importorskip("cuda_standin")  # whose streams can be late
pytestmark = pytest.mark.usefixtures("standin")
WHICH = ("side", "default", "all")


@pytest.fixture
def step(cuda):
    """A model, a batch and a plan that moves all that may move."""
    torch.manual_seed(0)
    model, batch = mlp(3, 32).to(cuda), torch.randn(64, 32, device=cuda)
    graph = lowtide.trace(model, batch)
    return model, batch, moving(graph, movable(graph))


def steps_differ(model, batch, plan, which, steps=3):
    """Names of what differs from the plain step, in steps one after the other under ``plan``."""
    expected, found = plain(model, batch), []
    with lowtide.apply(model, plan) as applied:
        for _ in range(steps):
            model.zero_grad()
            torch.manual_seed(7)
            with cuda_standin.run_late(which):
                loss, _ = run_step(model, batch, None)
                loss.backward()
            found += differing(expected, outcome(model, loss))
    assert applied.counts.moved
    return found


@pytest.mark.parametrize("which", WHICH)
def test_what_moves_to_pinned_memory_and_back_has_its_bits_however_late(step, which):
    assert steps_differ(*step, which) == []


def without(method, text):
    """``method`` compiled again without ``text``, a line of it."""
    source = textwrap.dedent(inspect.getsource(method))
    assert text in source
    scope = dict(vars(host_tier))
    exec(source.replace(text, "pass"), scope)
    return scope[method.__name__]


def test_a_copy_that_nobody_waits_for_is_seen(step, monkeypatch):
    monkeypatch.setattr(host_tier, "_wait", lambda *_: None)
    assert steps_differ(*step, "side") != []


def test_a_copy_that_does_not_wait_for_what_it_copies_is_seen(step, monkeypatch):
    start = without(host_tier.HostCopy._start, "stream.wait_stream(owner)")
    monkeypatch.setattr(host_tier.HostCopy, "_start", start)
    assert steps_differ(*step, "default") != []
