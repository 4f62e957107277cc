"""What a step costs an accelerator's memory, on a CPU that is taken for one."""

import pytest
import torch
from support.training_steps import mlp

import lowtide
from lowtide.device import block_size, generators
from lowtide.recording import finished_graph, recorder
from lowtide.step import optimizer_state
from lowtide.step.execution_state import ExecutionState
from lowtide.tape.online.online_values import StoredValue
from lowtide.tape.online.room import ExpectedBytes


@pytest.fixture
def blocks(monkeypatch):
    monkeypatch.setattr(block_size, "block_bytes", lambda kind: 512)


def test_states_of_generators_are_in_host_memory(monkeypatch):
    model, batch = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)), torch.randn(2, 4)
    on_cpu = sum(op.rng_bytes for op in lowtide.trace(model, batch).ops)
    monkeypatch.setattr(recorder, "state_bytes", lambda _: generators.state_bytes(torch.device("meta", 0)))
    monkeypatch.setattr(generators, "is_accelerator", lambda device: device.type == "meta")

    assert on_cpu == torch.get_rng_state().numel()
    assert sum(op.rng_bytes for op in lowtide.trace(model, batch).ops) == 0


@pytest.mark.usefixtures("blocks")
def test_what_an_optimizer_keeps_is_in_blocks_before_and_after_its_first_step():
    model = mlp(2, 9)
    parameters = list(model.parameters())
    adam = torch.optim.AdamW(parameters)
    whole = sum(2 * -(-p.nbytes // 512) * 512 for p in parameters)

    before = optimizer_state.optimizer_bytes(adam, parameters)[0]
    model(torch.randn(3, 9)).sum().backward()
    adam.step()

    assert before == optimizer_state.optimizer_bytes(adam, parameters)[0] == whole


def test_what_an_optimizer_keeps_counts_once(monkeypatch):
    model, batch = mlp(2, 8), torch.randn(4, 8)
    adam = torch.optim.AdamW(model.parameters())
    model(batch).sum().backward()
    adam.step()
    graph = lowtide.trace(model, batch, optimizer=adam)
    everything = graph.resident_bytes + 1000  # of somebody else's
    monkeypatch.setattr(finished_graph, "is_accelerator", lambda device: True)
    monkeypatch.setattr(finished_graph, "device_name", lambda device: "a stand-in")
    monkeypatch.setattr(finished_graph, "counts_all", lambda device: True)
    monkeypatch.setattr(finished_graph, "allocated_bytes", lambda device: everything)

    again = lowtide.trace(model, batch, optimizer=adam)

    assert again.resident == graph.resident | {"other": 1000}


@pytest.mark.usefixtures("blocks")
def test_the_online_tape_counts_blocks():
    known, add, x = ExpectedBytes(), torch.ops.aten.add.Tensor, torch.zeros(3)

    assert known.of(known.key(add, (x, x)), add, (x, x), {}) == 512
    assert StoredValue(x.untyped_storage(), 0, 0, 0, ExecutionState(lambda: None)).bytes == 512
