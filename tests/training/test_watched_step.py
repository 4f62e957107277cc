"""The graph of a watched step: that of the step without a tape, whatever the budget let go."""

import copy
from collections import Counter

import pytest
import torch
from support.online_steps import online, recorded, recording_of
from torch import nn

import lowtide
from lowtide.graph.step_graph import DROP, FREE, PACK, RELEASE, RUN, UNPACK
from lowtide.measurement.allocator import peak_bytes
from lowtide.solvers.dispatch import solve

pytestmark = pytest.mark.usefixtures("one_thread")


class Layered(nn.Module):
    """Attention, layer norm, dropout and an in-place activation after BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.norm, self.act = nn.BatchNorm1d(64), nn.ReLU(inplace=True)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.act(self.norm(x.transpose(1, 2)))


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = Layered()
    for p in found.parameters():
        p.grad = torch.zeros_like(p)
    return found


@pytest.fixture(scope="module")
def batch():
    return torch.randn(8, 48, 64)


def watched(model, batch, budget_bytes=float("inf"), step=None):
    kept = {}

    def make(copied, budget):
        kept["model"] = copied
        return recorded(copied, budget)

    _, tape = online(model, batch, budget_bytes, step=step, make=make)
    recording = recording_of(tape)
    assert tape.problem == recording.problem == ""
    recording.note_backward(kept["model"])
    return (*recording.graph_and_costs(kept["model"], None), tape)


def plain_peak(graph, costs):
    plan = solve(graph, costs, None, method="none")
    return plan.predicted_peak_bytes - plan.start_bytes


def lifetimes(graph):
    """(op, output) -> the ops that ran when Python and when autograd let the storage go, if the device has it."""
    now, found = 0, {}
    for kind, number in graph.events:
        if kind == RUN:
            now = number
        elif kind == FREE:
            s = graph.storages[number]
            if s.bytes:
                found[s.op, s.output, "python"] = now
        elif kind == RELEASE:
            s = graph.storages[graph.saved[number]]
            found[s.op, s.output, "autograd"] = now
    return found


def test_its_plain_peak_is_the_allocators(model, batch):
    copied = copy.deepcopy(model)

    def step():
        torch.manual_seed(7)
        output = copied(batch)
        loss = output.square().mean()
        loss.backward()

    step()
    copied.zero_grad()
    measured = peak_bytes(step)
    graph, costs, _ = watched(model, batch)

    # A hand-written step holds the output, the loss and the saved square as the default step does.
    assert plain_peak(graph, costs) == pytest.approx(measured, rel=2e-3)


@pytest.mark.parametrize("share", [0.7, 0.45])
def test_it_does_not_depend_on_what_the_budget_let_go(model, batch, share):
    free_graph, _, free = watched(model, batch)
    graph, _, tape = watched(model, batch, share * free.live.peak)

    assert tape.releaser.num_released > 0
    assert [(o.name, o.backward, o.frame, o.reads, o.makes, o.writes) for o in graph.ops] == [
        (o.name, o.backward, o.frame, o.reads, o.makes, o.writes) for o in free_graph.ops
    ]
    assert [s.bytes for s in graph.storages] == [s.bytes for s in free_graph.storages]
    assert graph.saved == free_graph.saved
    assert lifetimes(graph) == lifetimes(free_graph)


def test_it_has_the_ops_of_a_rehearsal(model, batch):
    graph, _, _ = watched(model, batch)
    rehearsed = lowtide.trace(model, batch)

    forward = Counter(o.name for o in graph.forward_ops)
    forward.subtract(o.name for o in rehearsed.forward_ops)
    assert {n: c for n, c in forward.items() if c} == {"aten.ones_like.default": 1}  # backward's start, seen outside
    assert sum(o.backward for o in graph.ops) == sum(o.backward for o in rehearsed.ops) - 1
    assert graph.resident == rehearsed.resident
    outside = {"stored outside the model", "runs outside the model"}  # of a loss that the rehearsal has invented
    assert {s.fixed for s in rehearsed.storages} - outside == {s.fixed for s in graph.storages}


def test_a_loss_outside_is_in_the_graph_and_may_be_recomputed(model, batch):
    head = torch.randn(48, 500)

    def step(model, x):
        return (model(x) @ head).log_softmax(-1).square().mean()

    graph, _, _ = watched(model, batch, step=step)

    outside = [s for op in graph.ops if op.name == "aten._log_softmax.default" for s in op.makes]
    assert [graph.storages[s].fixed for s in outside] == [""]


def test_what_the_caller_lets_go_is_not_counted(model, batch):
    def keeping(model, x):
        keeping.output = model(x)
        return keeping.output.square().mean()

    def leaving(model, x):
        return model(x).square().mean()

    def freed(graph):
        return sum(kind == FREE for kind, _ in graph.events)

    kept, _, _ = watched(model, batch, step=keeping)
    left, _, _ = watched(model, batch, step=leaving)
    assert freed(left) == freed(kept) + 1
    del keeping.output


def test_events_come_in_pairs(model, batch):
    graph, _, _ = watched(model, batch, 0)
    counts = Counter(kind for kind, _ in graph.events)
    assert counts[PACK] == counts[RELEASE] == len(graph.saved)
    assert counts[UNPACK] <= counts[PACK]
    assert counts[RUN] == len(graph.ops)


def test_new_gradients_count_as_there_before(batch):
    torch.manual_seed(0)
    fresh = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    accumulating = copy.deepcopy(fresh)
    for p in accumulating.parameters():
        p.grad = torch.zeros_like(p)

    first, costs, _ = watched(fresh, batch)
    second, others, _ = watched(accumulating, batch)

    assert first.resident == second.resident
    assert plain_peak(first, costs) == plain_peak(second, others)


def test_what_a_node_of_autograd_has_let_go_of_is_dropped_before_its_bias_gradient():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    graph, _, _ = watched(layers, torch.randn(32, 16))
    names = [op.name for op in graph.ops]
    ran = [(names[number] if kind == RUN else "DROP" if kind == DROP else "") for kind, number in graph.events]
    ran = [what for what in ran if what in ("aten.mm.default", "aten.sum.dim_IntList", "DROP")]

    # The second layer's: its input and weight go after the products of its gradients, and its bias is summed up then.
    before = ran[: ran.index("aten.sum.dim_IntList")][::-1]
    assert before[:2] == ["DROP", "DROP"] and before[2:4] == ["aten.mm.default"] * 2
