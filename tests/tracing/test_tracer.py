"""What ``trace`` sees of a step, and that simulating it gives the allocator's own peak."""

import json
import weakref
from contextlib import nullcontext

import pytest
import torch
from support.garbage import living
from support.unseen_memory import memory_of
from torch import library as registry
from torch import nn

import lowtide
from lowtide.device.memory import PeakCounter
from lowtide.graph.costs import Costs
from lowtide.graph.json_format import from_dict
from lowtide.graph.step_graph import DROP, FREE, RELEASE, RUN, UNPACK, to_dict
from lowtide.measurement.allocator import peak_bytes
from lowtide.recording.gradient_sums import GradientSums
from lowtide.simulation.simulator import simulate_actions


def peak_of(model, batch, step=None) -> int:
    """The allocator's peak of one plain step above what lives before it; gradients are there as they are now."""
    fn = step or (lambda model, batch: model(batch).float().square().mean())
    there = [p.grad is not None for p in model.parameters()]

    def run():
        fn(model, batch).backward()

    run()
    for p, had_one in zip(model.parameters(), there, strict=True):
        if not had_one:
            p.grad = None
    return peak_bytes(run)


def simulated_peak(model, batch, step) -> int:
    graph = lowtide.trace(model, batch, step=step)
    return simulate_actions(graph, Costs((1.0,) * len(graph.ops)), {}).peak_bytes - graph.start_bytes


class Recurrent(nn.Module):
    """A state carried by slices: autograd sums their gradients in place."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x, state = self.a(x), 0
        for t in range(x.shape[1]):
            state = torch.tanh(x[:, t] + self.b(state) if t else x[:, t])
        return state


class CalledTwice(nn.Module):
    """Parts of one weight's gradient are transposed views: autograd sums them out of place."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return self.inner(torch.tanh(self.inner(x)))


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 64, 5),
    )  # fmt: skip


def mean_square(model, batch):
    return model(batch).float().square().mean()


def in_bf16(model, batch):
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        return model(batch).float().square().mean()


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), (16, 32), mean_square),
    "dropout": (lambda: nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 32)), (16, 32), mean_square),
    "attention": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (2, 24, 32), mean_square),
    "attention in bf16": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (2, 24, 32), in_bf16),
    "convolutions": (conv_net, (4, 3, 16, 16), mean_square),
    "recurrent": (Recurrent, (8, 12, 16), mean_square),
    "called twice": (CalledTwice, (4, 64), mean_square),
    "lstm": (lambda: Last(nn.LSTM(16, 32, 2)), (10, 4, 16), mean_square),
    "gather": (lambda: Picks(lambda x: x.gather(1, torch.arange(4).expand(512, 4))), (512, 8), mean_square),
    "topk": (lambda: Picks(lambda x: x.topk(4).values), (512, 8), mean_square),
    "index_select": (lambda: Picks(lambda x: x.index_select(1, torch.arange(4))), (512, 8), mean_square),
    "indices": (lambda: Picks(lambda x: x[:, torch.arange(4)]), (512, 8), mean_square),
}


class Picks(nn.Module):
    """Few of many: the gradient that is mostly zeros sets the peak."""

    def __init__(self, pick):
        super().__init__()
        self.inner, self.pick = nn.Linear(8, 256), pick

    def forward(self, x):
        return self.pick(self.inner(x))


class Last(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


@pytest.mark.parametrize("gradients", ["made in backward", "there before", "some there before"])
@pytest.mark.parametrize("name", MODELS)
def test_the_simulated_plain_peak_is_the_allocators(name, gradients):
    build, shape, step = MODELS[name]
    torch.manual_seed(0)
    model, batch = build(), torch.randn(shape)
    if gradients != "made in backward":
        for p in list(model.parameters())[:: 2 if gradients == "some there before" else 1]:
            p.grad = torch.zeros_like(p)

    assert simulated_peak(model, batch, step) == pytest.approx(peak_of(model, batch, step), rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_every_graph_reads_back_equal_from_json(name):
    build, shape, step = MODELS[name]

    graph = lowtide.trace(build(), torch.randn(shape), step=step)

    assert from_dict(json.loads(json.dumps(to_dict(graph)))).fingerprint == graph.fingerprint


def test_without_folding_the_engines_sums_the_recurrent_peak_is_wrong(monkeypatch):
    monkeypatch.setattr("lowtide.tracing.tracer.fold", lambda graph, targets: graph)
    model, batch = Recurrent(), torch.randn(8, 12, 16)

    assert simulated_peak(model, batch, mean_square) > 1.01 * peak_of(model, batch)


def test_without_workspace_the_convolutions_peak_is_wrong(monkeypatch):
    monkeypatch.setattr("lowtide.recording.recorder.measuring", lambda device: nullcontext(PeakCounter()))
    model, batch = conv_net(), torch.randn(4, 3, 16, 16)

    assert simulated_peak(model, batch, mean_square) < 0.99 * peak_of(model, batch)


def test_the_graph_says_what_ran():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))

    graph = lowtide.trace(model, torch.randn(3, 4))

    forward = [(op.name, graph.scope(op)) for op in graph.forward_ops if op.makes]
    assert forward == [
        ("aten.addmm.default", "0"),
        ("aten.tanh.default", "1"),
        ("aten.empty_like.default", "2"),  # the mask; two in-place ops finish it
        ("aten.mul.Tensor", "2"),
        ("aten.addmm.default", "3"),
        ("aten.pow.Tensor_Scalar", ""),
        ("aten.mean.default", ""),
    ]
    mask = next(op for op in graph.forward_ops if op.name == "aten.empty_like.default")
    finishing = [op.name for op in graph.forward_ops if op.completes_inplace == mask.id]
    assert finishing == ["aten.bernoulli_.float", "aten.div_.Scalar"]
    assert mask.rng_bytes == torch.get_rng_state().numel()
    assert [(graph.storages[s].bytes, graph.storages[s].fixed) for s in mask.makes] == [(96, "")]  # float32 on CPU
    assert mask.makes[0] in graph.stored
    unpacked = {graph.saved[n] for kind, n in graph.events if kind == UNPACK}
    assert graph.stored <= unpacked
    assert graph.resident["parameters"] == graph.resident["gradients"] == 4 * (4 * 8 + 8 + 8 + 1)
    assert from_dict(to_dict(graph)).fingerprint == graph.fingerprint


def test_what_runs_outside_the_model_is_left_alone_unless_step_says_it_is_the_step():
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)

    outside = lowtide.trace(model, batch)
    inside = lowtide.trace(model, batch, step=lambda model, batch: model(batch).square().mean())

    assert {s.fixed for s in outside.storages if s.op is not None and outside.ops[s.op].frame == 0} >= {
        "runs outside the model"
    }
    assert not any(s.fixed for s in inside.storages)


def test_memory_written_during_the_step_is_fixed_and_so_is_what_was_computed_from_it():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x):
            y = x * self.w
            kept = y.exp()
            y.detach().add_(1)
            return kept + y.sin()

    graph = lowtide.trace(Writes(), torch.randn(4), step=lambda m, b: m(b).sum())

    by_op = {graph.ops[s.op].name: s.fixed for s in graph.storages if s.op is not None and not graph.ops[s.op].backward}
    assert by_op["aten.mul.Tensor"] == "written during the step"
    assert by_op["aten.exp.default"] == "was computed from memory that is written later in the step"
    assert by_op["aten.sin.default"] == ""


def test_an_optimizers_state_is_counted_before_its_first_step():
    model, batch = nn.Linear(64, 64), torch.randn(2, 64)
    parameters = 4 * (64 * 64 + 64)

    bare = lowtide.trace(model, batch)
    adam = lowtide.trace(model, batch, optimizer=torch.optim.AdamW(model.parameters()))
    momentum = lowtide.trace(model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=1, momentum=0.9))

    assert bare.resident["optimizer"] == 0
    assert adam.resident["optimizer"] == lowtide.trace(model, batch, optimizer="adamw").resident["optimizer"]
    assert adam.resident["optimizer"] == 2 * parameters
    assert momentum.resident["optimizer"] == parameters
    assert adam.optimizer_step_bytes > 0


@registry.custom_op("lowtide_test::sneaky", mutates_args=())
def sneaky(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    memory_of(state)[...] += 1  # the schema says nothing of it
    return x * 2


sneaky.register_autograd(lambda ctx, grad: (grad * 2, None))


def test_a_signature_that_lies_is_seen_at_first_sight():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))
            self.register_buffer("state", torch.zeros(4))

        def forward(self, x):
            return sneaky(x * self.w, self.state)

    model = Model()
    graph = lowtide.trace(model, torch.ones(4), step=lambda m, b: m(b).sum())

    (made,) = (s for s in graph.storages if s.op is not None and graph.ops[s.op].name == "lowtide_test.sneaky.default")
    assert made.fixed == "changes an input that its schema says it only reads"
    assert model.state.tolist() == [0, 0, 0, 0]  # and the rehearsal is undone


def masked(h):
    return torch.where(h.detach() > 0, h, h * 2)


def scaled(h):
    return h * h[:1].sum(0, keepdim=True).detach()


@pytest.mark.parametrize(("forward", "name"), [(masked, "aten.gt.Scalar"), (scaled, "aten.sum.dim_IntList")])
def test_what_backward_is_handed_is_held_until_its_op_has_run(forward, name):
    # A mask and a small tensor: the trace has copies of these, and their lives are not the handed-out tensors'.
    model = nn.Linear(16, 16)
    graph = lowtide.trace(model, torch.randn(64, 16), step=lambda m, x: forward(m(x)).square().mean())
    made = next(s.id for s in graph.storages if s.op is not None and graph.ops[s.op].name == name)
    handles = [i for i, s in enumerate(graph.saved) if s == made]

    kinds = [kind for kind, number in graph.events if kind == RUN or (kind != FREE and number in handles)]
    kinds = kinds[kinds.index(UNPACK) :]

    assert kinds.index(RUN) < kinds.index(DROP) < kinds.index(RELEASE)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad + grad  # the tracer asks which node runs, and holds it
        raise ctx.error("half-way")


@pytest.fixture
def nodes_in_reach(monkeypatch):
    """What autograd holds for the recorder leads to the recorder's nodes: a cycle through C++ that nobody collects."""

    def lead_there(self, live):
        before(self, live)
        live._builder.sums = self

    before = GradientSums.__init__
    monkeypatch.setattr(GradientSums, "__init__", lead_there)


def parameters_left_by_a_failed_backward(error: type[BaseException]) -> int:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    parameters = [weakref.ref(p) for p in model.parameters()]

    def step(model, x):
        return model[2](FailsInBackward.apply(model[:2](x), error)).square().mean()

    with pytest.raises(error, match="half-way"):
        lowtide.trace(model, torch.randn(3, 4), step=step)
    del model
    return living(*parameters)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_model_is_freed_after_its_backward_has_failed_in_a_trace(error, nodes_in_reach):
    assert parameters_left_by_a_failed_backward(error) == 0


def test_without_forgetting_the_nodes_a_failed_trace_keeps_the_model(monkeypatch, nodes_in_reach):
    monkeypatch.setattr(GradientSums, "forget_nodes", lambda self: None)

    assert parameters_left_by_a_failed_backward(ValueError) == 4


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_autograd_holds_leads_to_no_node(error, monkeypatch):
    monkeypatch.setattr(GradientSums, "forget_nodes", lambda self: None)

    assert parameters_left_by_a_failed_backward(error) == 0
