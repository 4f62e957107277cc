"""Storages kept inexactly: only where allowed, as far off as the format says, and counted to the byte."""

import json
import random
from dataclasses import replace

import pytest
import torch
from steps import differing, is_clean, mlp, outcome, plain, same_state, state_of
from test_moving import blocks, tokens, under
from torch import nn
from toys import chain, decoder, decoder_costs

import lowtide
from lowtide.errors import BudgetInfeasibleError, GraphFormatError, PlanMismatchError, TierError
from lowtide.graph.costs import DISK, FP8, INT8, Costs, Link
from lowtide.graph.lossy import BLOCK, CHUNK, packable, packed_bytes, packing_bytes, unpacking_bytes
from lowtide.graph.serial import from_dict
from lowtide.graph.step_graph import to_dict
from lowtide.meters import peak_bytes
from lowtide.packing import pack, relative_error, unpack
from lowtide.plan import DISK_OFFLOAD, RECOMPUTE, SAVE_FP8, SAVE_INT8, Plan
from lowtide.simulator import simulate, simulate_actions
from lowtide.solvers.draft import Draft, finish
from lowtide.solvers.elsewhere import elsewhere
from lowtide.solvers.front_door import solve
from lowtide.transfers import Moves

FAST = Link(1e12, 1e12)
FORMS = {INT8: SAVE_INT8, FP8: SAVE_FP8}


def packing(graph, storages, action=SAVE_INT8, recomputed=(), moved=()):
    """A plan that keeps ``storages`` inexactly, moves ``moved``, recomputes ``recomputed`` and saves the rest."""
    costs = Costs((1.0,) * len(graph.ops), links=dict.fromkeys((INT8, FP8, DISK), FAST))
    actions = dict.fromkeys(graph.stored, "save") | dict.fromkeys(recomputed, RECOMPUTE)
    actions |= dict.fromkeys(moved, DISK_OFFLOAD) | dict.fromkeys(storages, action)
    return finish(graph, costs, Draft(actions), method="none", budget_bytes=None, start_s=0)


def gradients_off(model, batch, ours):
    """Norm of what differs of all gradients, relative to the plain step's."""
    theirs = plain(model, batch)
    names = [n for n in theirs if n.startswith("gradient")]
    change = sum(float((ours[n] - theirs[n]).double().square().sum()) for n in names)
    return (change / sum(float(theirs[n].double().square().sum()) for n in names)) ** 0.5


# The format


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, BLOCK, 1000, CHUNK + BLOCK + 3])
def test_int8_is_off_by_at_most_half_a_step_of_its_block(dtype, count):
    x = (torch.randn(count, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, count)).to(dtype)

    back = unpack(pack(x, INT8), torch.empty_like(x))

    for begin in range(0, count, BLOCK):
        block, error = x[begin : begin + BLOCK].float(), (back - x)[begin : begin + BLOCK].float().abs()
        step = block.abs().max() / 127
        assert error.max() <= step / 2 * 1.001 + torch.finfo(dtype).eps * block.abs().max()


def test_fp8_is_off_by_at_most_a_sixteenth_of_each_element_or_the_smallest_step():
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)) ** 3

    back = unpack(pack(x, FP8), torch.empty_like(x))

    scale = (
        torch.nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK) / 448
    )
    assert ((back - x).abs() <= torch.maximum(x.abs() / 16, scale[: len(x)] * 2**-10) * 1.001).all()
    assert 0.01 < relative_error(pack(x, FP8), x) < 0.04


@pytest.mark.parametrize("form", FORMS)
def test_zeros_and_whole_steps_come_back_exactly(form):
    x = torch.tensor([0.0] * BLOCK + [0.0, 1.0, -1.0])

    assert torch.equal(unpack(pack(x, form), torch.empty_like(x)), x) and relative_error(pack(x, form), x) == 0
    assert relative_error(pack(x[:BLOCK], form), x[:BLOCK]) == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_not_packed(form, bad):
    x = torch.ones(1000)
    x[700] = bad

    assert pack(x, form) is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1000, CHUNK, 3 * CHUNK + 77])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packing_takes_the_bytes_that_the_judge_counts(form, count, dtype):
    x, held = torch.randn(count).to(getattr(torch, dtype)), []

    def packs():
        held.append(pack(x, form))

    packs()
    assert peak_bytes(packs) == packed_bytes(x.nbytes, dtype) + packing_bytes(x.nbytes, dtype)
    out = torch.empty_like(x)
    assert peak_bytes(lambda: unpack(held[0], out)) == unpacking_bytes(x.nbytes, dtype)
    assert held[0].bytes.nbytes + held[0].scales.nbytes == packed_bytes(x.nbytes, dtype)


def test_a_torch_without_the_dtype_is_named_with_the_way_out(monkeypatch):
    monkeypatch.delattr(torch, "float8_e4m3fn")

    with pytest.raises(TierError, match=r'has no float8_e4m3fn, which lossy="fp8" needs\. Use "int8"'):
        lowtide.fit(mlp(4, 64), torch.randn(64, 64), budget="50%", lossy="fp8")


# What may be


def test_no_input_parameter_index_mask_or_statistic_may_be_kept_inexactly():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.out = nn.Embedding(32, 64), nn.LayerNorm(64), nn.Linear(64, 64)

        def forward(self, ids, scale):
            x = self.norm(self.embed(ids))
            x = nn.functional.dropout(torch.relu(self.out(x)), 0.5)
            x = x * (x > 0.1).float() * scale + x.sigmoid() * torch.arange(64.0)
            return x.masked_fill(ids.unsqueeze(-1) > 16, -9.0).square().log_softmax(-1)

    batch = {"ids": torch.randint(0, 32, (8, 16)), "scale": torch.rand(8, 16, 64)}
    graph = lowtide.trace(Model(), batch)

    names = {graph.ops[graph.storages[s].op].name for s in packable(graph)}
    assert names and names <= {
        "aten.native_layer_norm.default", "aten.relu.default", "aten.addmm.default", "aten.mul.Tensor",
        "aten.sigmoid.default", "aten.add.Tensor",
    }  # fmt: skip
    stored = {graph.ops[graph.storages[s].op].name for s in graph.stored}
    assert stored - names >= {"aten.embedding.default", "aten.masked_fill.Scalar", "aten._log_softmax.default"} & stored
    for s in packable(graph):
        assert graph.storages[s].output == 0 and graph.storages[s].kind == "activation"
        assert graph.ops[graph.storages[s].op].rng_bytes == 0


def test_a_storage_that_autograd_reads_as_another_dtype_may_not():
    model, batch = mlp(2, 64), torch.randn(16, 64)

    def step(model, batch):
        x = torch.tanh(model(batch))
        return torch.view_as_complex(x.view(16, 32, 2)).abs().square().sum()

    graph = lowtide.trace(model, batch, step=step)

    last = [s for s in graph.stored if "tanh" in graph.ops[graph.storages[s].op].name][-1:]
    others = {s for s in packable(graph)}
    assert others and last and not any(graph.storages[s].dtype for s in last if graph.saved.count(s) > 1)


def test_the_dtype_survives_json_and_a_damaged_one_is_refused():
    graph = lowtide.trace(mlp(2, 64), torch.randn(16, 64))
    body = json.loads(json.dumps(to_dict(graph)))
    assert from_dict(body) == graph and any(s.dtype == "float32" for s in graph.storages)

    row = next(row for row in body["storages"] if len(row) == 6)
    row[5] = "float64"
    with pytest.raises(GraphFormatError, match=r"storages\[\d+\]\.dtype"):
        from_dict(body)


# Carried out


@pytest.mark.parametrize("form", FORMS)
def test_everything_kept_inexactly_gives_the_same_loss_close_gradients_and_the_predicted_peak(form):
    model, batch = blocks(), tokens()
    graph = lowtide.trace(model, batch)
    plan = packing(graph, packable(graph), FORMS[form])

    ours, counts = under(model, batch, plan, lossy=form)

    assert counts.moved == plan.counts[FORMS[form]] > 10 and counts.mismatched == 0
    assert torch.equal(ours["loss"], plain(model, batch)["loss"])
    assert 1e-5 < gradients_off(model, batch, ours) < 0.1
    proof = lowtide.verify(model, batch, plan, rounds=0, lossy=form)
    assert proof.measured_peak_bytes == plan.predicted_peak_bytes < plan.plain_peak_bytes
    assert proof.loss_bitwise_equal and not proof.gradients_bitwise_equal
    assert proof.gradient_error == pytest.approx(gradients_off(model, batch, ours), rel=0.2)
    assert "%" in proof.worst_gradient and len(proof.inexact) == plan.counts[FORMS[form]]
    assert 0 < proof.inexact[-1][1] <= proof.inexact[0][1] < 0.1


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_with_inexact_ones_has_the_predicted_peak(seed):
    chance = random.Random(seed)
    model, batch = blocks(2), tokens()
    graph = lowtide.trace(model, batch)
    packed = [s for s in sorted(packable(graph)) if chance.random() < 0.5]
    fixed = {m for op in graph.forward_ops if not set(packed).isdisjoint(op.reads) for m in op.makes}
    rest = [s for s in sorted(graph.stored - set(packed)) if not graph.storages[s].fixed]
    fate = {s: chance.choice(["save", "move", "recompute"]) for s in rest}
    recomputed = [s for s, f in fate.items() if f == "recompute" and s not in fixed]
    plan = packing(graph, packed, recomputed=recomputed, moved=[s for s, f in fate.items() if f == "move"])

    _, counts = under(model, batch, plan, lossy=INT8)
    proof = lowtide.verify(model, batch, plan, rounds=0, lossy=INT8)

    assert counts.mismatched == 0 and proof.measured_peak_bytes == plan.predicted_peak_bytes
    assert proof.gradient_error < 0.1


def test_a_second_backward_over_a_retained_graph_unpacks_the_same_again():
    model, batch = blocks(2), tokens()
    graph = lowtide.trace(model, batch)
    plan = packing(graph, packable(graph))

    once, _ = under(model, batch, plan, lossy=INT8)
    twice, _ = under(
        model, batch, plan, lossy=INT8, backward=lambda loss: (loss.backward(retain_graph=True), loss.backward())
    )

    gradients = [n for n in once if n.startswith("gradient")]
    assert all(torch.equal(twice[n], 2 * once[n]) for n in gradients)


def test_a_step_with_infinities_keeps_them_as_they_are_and_says_so():
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()), torch.randn(16, 64)
    graph = lowtide.trace(model, batch)
    plan = packing(graph, packable(graph))
    model[0].weight.data[0, 0] = float("nan")

    ours, counts = under(model, batch, plan, lossy=INT8)

    assert counts.mismatched == plan.counts[SAVE_INT8] > 0 and counts.moved == 0
    assert differing(plain(model, batch), ours) == []


def test_no_replay_reads_what_is_kept_inexactly_whatever_a_plan_says():
    model, batch = mlp(6, 64), torch.randn(32, 64)
    graph = lowtide.trace(model, batch)
    reader = {m for op in graph.forward_ops if not packable(graph).isdisjoint(op.reads) for m in op.makes}
    packed = sorted(packable(graph))[::2]
    recomputed = sorted((packable(graph) & reader) - set(packed))
    assert recomputed
    plan = packing(graph, packed, recomputed=recomputed)  # made by hand: no solver would

    ours, counts = under(model, batch, plan, lossy=INT8)
    without, _ = under(model, batch, packing(graph, packed), lossy=INT8)

    assert counts.mismatched > 0 and differing(without, ours) == []


def test_an_in_place_op_that_would_read_it_again_is_not_replayed_either():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))

        def forward(self, x):
            h = torch.tanh(self.a(x))
            return self.c(self.b(x).add_(h).tanh())

    model, batch = Model(), torch.randn(32, 64)
    graph = lowtide.trace(model, batch)
    tanhs = [s for s in sorted(packable(graph)) if "tanh" in graph.ops[graph.storages[s].op].name]
    finished = [op.finishes for op in graph.forward_ops if op.finishes is not None]
    made = [s for op in finished for s in graph.ops[op].makes]
    assert made
    plan = packing(graph, tanhs[:1], recomputed=made)

    ours, counts = under(model, batch, plan, lossy=INT8)
    without, _ = under(model, batch, packing(graph, tanhs[:1]), lossy=INT8)

    assert counts.mismatched == 1 and differing(without, ours) == []


# Allowed, or not


def test_a_plan_that_keeps_storages_inexactly_is_refused_unless_that_is_allowed():
    model, batch = blocks(1), tokens()
    graph = lowtide.trace(model, batch)
    plan = packing(graph, packable(graph))
    before = state_of(model)

    for allowed in ({}, {"lossy": FP8}):
        with pytest.raises(TierError) as caught, lowtide.apply(model, plan, **allowed):
            pass
        with pytest.raises(TierError):
            lowtide.verify(model, batch, plan, **allowed)
        count = plan.counts[SAVE_INT8]
        assert str(caught.value) == (
            f"the plan keeps {count} storages as int8, so gradients would not be the plain step's, and that was not "
            "allowed.\nPass lossy='int8' to allow it, or solve without."
        )
    assert is_clean(model) and same_state(before, state_of(model))


@pytest.fixture
def dear(monkeypatch):
    """Ops that take a millisecond, and packing that takes none."""

    def costs(graph, *, tiers=(), scratch_dir=None):
        return Costs((1.0,) * len(graph.ops), links=dict.fromkeys(tiers, FAST))

    monkeypatch.setattr("lowtide.planning.measure", costs)


@pytest.mark.parametrize("form", FORMS)
def test_fit_keeps_storages_inexactly_where_it_pays_and_reports_how_far_off_that_is(dear, form):
    model, batch = blocks(), tokens()

    with lowtide.fit(model, batch, budget="55%", lossy=form) as fit:
        proof = fit.verify(batch, rounds=0)
        report = fit.report()
        theirs = plain(model, batch)
        torch.manual_seed(7)
        model.zero_grad()
        loss, _ = lowtide.tracing.tracer.run_step(model, batch, None)
        loss.backward()
        ours = outcome(model, loss)

    assert fit.plan.counts[FORMS[form]] > 0 and fit.plan.lossy == form
    assert proof.measured_peak_bytes == proof.predicted_peak_bytes <= fit.plan.budget_bytes
    assert torch.equal(ours["loss"], theirs["loss"]) and not proof.gradients_bitwise_equal
    assert f"{FORMS[form]} {fit.plan.counts[FORMS[form]]} (" in report
    assert "what packing changed of them at worst" in report and "off plain's, by that alone; furthest" in report
    assert "do not train with this plan" not in report and "DIFFERENT" not in report
    assert FORMS[form] in str(fit.plan.explain()) and f"{form} store" in str(fit.plan.explain())


def test_without_being_asked_nothing_is_kept_inexactly(dear):
    model, batch = blocks(), tokens()

    with lowtide.fit(model, batch, budget="55%") as fit:
        assert fit.plan.lossy == "" and fit.costs.links == {} and fit.verify(batch, rounds=0).equal


def test_only_modules_that_are_named_are_touched(dear):
    model, batch = blocks(), tokens()

    with lowtide.fit(model, batch, budget="70%", lossy={"int8": "*.mlp*"}) as fit:
        paths = {fit.plan.scope(d) for d in fit.plan.decisions if d.action == SAVE_INT8}

    assert paths and all(".mlp" in path for path in paths)


# Planned


def floats(graph):
    """A handmade graph whose activations are float32 throughout."""
    made = tuple(replace(s, dtype="float32") if s.kind == "activation" else s for s in graph.storages)
    return replace(graph, storages=made)


def case(speed):
    """A decoder, and packing that would take all it stores ``speed`` times in a step."""
    graph = floats(decoder(layers=2))
    costs = decoder_costs(graph)
    stored = sum(graph.storages[s].bytes for s in graph.stored)
    rate = 2 * speed * stored / costs.plain_step_ms * 1e3
    return graph, replace(costs, links={INT8: Link(rate, rate)})


def test_where_packing_is_cheap_what_is_dear_is_packed():
    graph, costs = case(speed=50)
    alone = solve(graph, costs, "60%")

    plan = solve(graph, costs, "60%", lossy="int8")

    assert plan.counts[SAVE_INT8] > 0 and plan.predicted_overhead < alone.predicted_overhead / 2
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    line = simulate(graph, costs, plan)
    assert line.step_ms == plan.predicted_step_ms and line.stall_ms > 0


def test_where_packing_is_dear_nothing_is_packed_and_the_plan_is_the_one_without():
    graph, costs = case(speed=0.05)

    plan = solve(graph, costs, "40%", lossy="int8")

    assert plan.counts[SAVE_INT8] == 0
    assert plan.predicted_step_ms == solve(graph, costs, "40%").predicted_step_ms


def test_packing_reaches_budgets_that_recomputing_cannot_and_says_how_far_it_goes():
    graph, costs = case(speed=5)
    with pytest.raises(BudgetInfeasibleError) as alone:
        solve(graph, costs, 1)
    with pytest.raises(BudgetInfeasibleError) as packed:
        solve(graph, costs, 1, lossy="int8")

    plan = solve(graph, costs, packed.value.least_bytes, lossy="int8")

    assert packed.value.least_bytes <= alone.value.least_bytes
    assert plan.predicted_peak_bytes <= packed.value.least_bytes


def test_packing_and_a_disk_are_planned_together():
    graph, costs = case(speed=5)
    costs = replace(costs, links={**costs.links, DISK: Link(1e5, 1e5)})

    both = solve(graph, costs, "40%", lossy="int8", offload=("disk",))

    one, other = solve(graph, costs, "40%", lossy="int8"), solve(graph, costs, "40%", offload=("disk",))
    assert both.predicted_step_ms <= 1.001 * min(one.predicted_step_ms, other.predicted_step_ms)


@pytest.mark.parametrize("seed", range(30))
def test_a_step_with_inexact_storages_elsewhere_has_the_peak_that_the_judge_says(seed):
    chance = random.Random(seed)
    graph = floats(chance.choice([chain(8, size=4096), decoder(layers=2)]))
    costs = Costs((1.0,) * len(graph.ops), links={INT8: FAST, DISK: FAST})
    fates = {s: chance.choice(["save", SAVE_INT8, SAVE_INT8, DISK_OFFLOAD]) for s in sorted(packable(graph))}
    moves = Moves(chance.choice([0, 20_000]))

    judged = simulate_actions(graph, costs, fates, moves=moves)
    line = simulate_actions(*elsewhere(graph, costs, fates, moves), {})

    assert SAVE_INT8 in fates.values()
    assert (line.peak_bytes, line.live_bytes[-1]) == (judged.peak_bytes, judged.live_bytes[-1])


def test_packing_takes_time_of_the_step_itself_both_ways():
    graph = floats(chain(4, size=4000))
    first = min(packable(graph))
    costs = Costs((1.0,) * len(graph.ops), links={INT8: Link(1e6, 5e5, 0.5)})

    line = simulate(graph, costs, {first: SAVE_INT8})

    # 4000 bytes at 1 MB/s, and back at half that, half a millisecond each before it begins
    assert line.step_ms == pytest.approx(len(graph.ops) + 4.5 + 8.5) and line.stall_ms == pytest.approx(13.0)


def test_the_judge_refuses_what_must_not_be_kept_inexactly():
    graph, costs = case(speed=1)
    plain_graph = decoder(layers=2)  # of no known dtype
    stored = min(packable(graph))
    reader = next(op for op in graph.forward_ops if stored in op.reads and op.makes)

    with pytest.raises(PlanMismatchError, match="is no floating activation made from what is trained"):
        simulate(plain_graph, costs, {stored: SAVE_INT8})
    with pytest.raises(PlanMismatchError, match=f"its op reads storage {stored}, which is kept inexactly"):
        simulate(graph, costs, {stored: SAVE_INT8, reader.makes[0]: RECOMPUTE})
    with pytest.raises(PlanMismatchError, match="needs the link to the int8 tier"):
        simulate(graph, replace(costs, links={}), {stored: SAVE_INT8})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lossy": "int4"}, "lossy='int4' is not known. Use 'int8' or 'fp8', or one of them with the modules"),
        ({"lossy": {"int8": "*", "fp8": "*"}}, "is not known"),
        ({"lossy": {}}, "is not known"),
        ({"lossy": "fp8"}, "costs does not know how long packing takes. Measure it"),
        ({"lossy": "int8", "method": "full"}, "has no meaning for method='full'. Use method=\"exact\""),
    ],
)
def test_a_lossy_that_makes_no_sense_is_refused(options, message):
    graph, costs = case(speed=1)

    with pytest.raises(ValueError) as caught:
        solve(graph, costs, "45%", **options)

    assert message in str(caught.value)


def test_packing_is_measured_like_an_op():
    graph = lowtide.trace(mlp(2, 64), torch.randn(16, 64))

    link = lowtide.measure(graph, tiers=("int8",)).links[INT8]

    assert 1e7 < link.store_bytes_per_s < 1e12 and link.latency_ms >= 0


def test_a_plan_that_keeps_storages_inexactly_is_of_a_version_that_older_readers_refuse():
    graph = lowtide.trace(blocks(1), tokens())
    exact, inexact = packing(graph, ()), packing(graph, packable(graph))

    assert json.loads(exact.to_json())["version"] == 1 and json.loads(inexact.to_json())["version"] == 2
    assert Plan.from_json(inexact.to_json()).decisions == inexact.decisions
    with pytest.raises(GraphFormatError, match="field 'version' is not 1 or 2"):
        Plan.from_json(inexact.to_json().replace('"version":2', '"version":3'))
