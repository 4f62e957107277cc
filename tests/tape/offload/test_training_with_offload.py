"""``fit`` with a disk beside memory: what it reaches, and what it says where there is none."""

from types import SimpleNamespace

import pytest
import torch
from support.memory_limit import limited
from support.offloads import flip_a_bit
from support.training_steps import differing, is_clean, mlp, outcome, plain, same_state, state_of
from torch import nn

import lowtide
from lowtide.errors import BudgetInfeasibleError, TierError
from lowtide.graph.costs import Costs, Link
from lowtide.graph.step_graph import UNPACK
from lowtide.scratch_file import ScratchInMemoryWarning
from lowtide.tape.offload.offloaded_tensor import Transfers
from lowtide.tracing.tracer import run_step


@pytest.fixture
def dear(monkeypatch):
    """Ops that take a millisecond and a link that takes none, so that something moves on any machine."""

    monkeypatch.setattr("lowtide.training.rehearsal.measure", lambda graph, **_: Costs((1.0,) * len(graph.ops)))
    monkeypatch.setattr("lowtide.training.shared_tiers.measured_link", lambda *of: Link(1e12, 1e12))


def decoder() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4,
        attention_dropout=0.1, pad_token_id=0,
    )  # fmt: skip
    ids = torch.randint(1, 256, (4, 128), generator=torch.Generator(torch.get_default_device()).manual_seed(2))
    return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


@pytest.mark.slow
def test_a_decoder_trains_bitwise_under_a_budget_that_recomputing_cannot_reach(tmp_path):
    model, batch = decoder()
    with pytest.raises(BudgetInfeasibleError) as alone:
        lowtide.fit(model, batch, budget=1)
    budget = int(0.97 * alone.value.least_bytes)
    with pytest.raises(BudgetInfeasibleError):
        lowtide.fit(model, batch, budget=budget)
    theirs = plain(model, batch)

    with lowtide.fit(model, batch, budget=budget, offload=lowtide.Offload(scratch_dir=tmp_path, checksums=True)) as fit:
        proof = fit.verify(rounds=0)
        torch.manual_seed(7)
        loss, _ = run_step(model, batch, None)
        loss.backward()

    assert fit.plan.counts["disk_offload"] > 0 and "offload" in fit.report(measure=False)
    assert differing(theirs, outcome(model, loss)) == []
    assert proof.equal and proof.measured_peak_bytes <= proof.predicted_peak_bytes <= budget
    assert proof.predicted_peak_bytes - proof.measured_peak_bytes <= 0.02 * proof.predicted_peak_bytes
    assert list(tmp_path.iterdir()) == [] and is_clean(model)


def test_a_disk_budget_alone_uses_the_systems_directory_and_is_kept(dear):
    model, batch = mlp(8, 64), torch.randn(512, 64)

    with lowtide.fit(model, batch, budget="40%", offload=lowtide.Offload(disk_budget="1MiB")) as fit:
        model(batch).square().mean().backward()
        moved = sum(d.bytes for d in fit.plan.decisions if d.action == "disk_offload")
        space = fit._lifecycle.plans_by_shape.plans[0].tape.tiers["disk"].space if moved else None

    assert 0 < moved <= 2**20 and space.budget_bytes == 2**20


def test_every_unpack_counts_of_the_loss_and_of_calls_that_move_nothing_too(dear, monkeypatch):
    counted = []
    on_unpack = Transfers.on_unpack
    monkeypatch.setattr(Transfers, "on_unpack", lambda self: (counted.append(1), on_unpack(self))[1])
    model, batch = mlp(8, 64), torch.randn(512, 64)

    with lowtide.fit(model, batch, budget="40%", offload=lowtide.Offload(disk_budget="1MiB")) as fit:
        model(batch).square().mean().backward()  # nobody has seen a step under the plan: hooks are everywhere
        counted.clear()
        model.zero_grad()
        model(batch).square().mean().backward()

        assert fit.plan.tiers and fit.status().in_force
        assert len(counted) == sum(kind == UNPACK for kind, _ in fit.graph.events)


def test_without_being_asked_nothing_moves():
    model, batch = mlp(8, 64), torch.randn(512, 64)

    with lowtide.fit(model, batch, budget="50%") as fit:
        assert fit.plan.tiers == frozenset() and fit.costs.links == {}


def test_a_new_input_shape_moves_too(dear):
    model, batch = mlp(8, 64), torch.randn(512, 64)
    other = torch.randn(768, 64)
    budget = lowtide.trace(model, other).resident_bytes + 3 * 2**20

    with lowtide.fit(model, batch, budget=budget, offload=lowtide.Offload(disk_budget="1GiB")) as fit:
        for _ in range(2):
            theirs = plain(model, other)
            torch.manual_seed(7)
            model.zero_grad()
            loss, _ = run_step(model, other, None)
            loss.backward()
            fit.wait()
            assert differing(theirs, outcome(model, loss)) == []

        assert fit.status().in_force and len(fit.plans) == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"host_budget": "1GiB"}, TierError, "there is no host tier beside a model on cpu"),
        ({"scratch_dir": "/not/there"}, TierError, "scratch_dir='/not/there' cannot hold a scratch file: No such file"),
        ({"scratch_dir": "/proc/self"}, TierError, "cannot hold a scratch file"),
        ({"disk_budget": "40%"}, ValueError, "disk_budget='40%' is not an amount of memory. Pass bytes as an int"),
        ({"disk_budget": "auto"}, ValueError, "disk_budget='auto' is not an amount"),
        ({"disk_budget": -1}, ValueError, "not positive"),
        ({"disk_budget": "1GiB", "method": "full"}, ValueError, "has no meaning for method='full'"),
    ],
)
def test_a_tier_that_cannot_be_used_is_refused_by_name_and_the_model_is_untouched(options, error, message):
    model, batch = mlp(4, 16), torch.randn(8, 16)
    before = state_of(model)

    with pytest.raises(error) as caught:
        method = {"method": options["method"]} if "method" in options else {}
        policy = lowtide.Offload(**{name: value for name, value in options.items() if name not in method})
        lowtide.fit(model, batch, budget="50%", offload=policy, **method)

    assert message in str(caught.value)
    assert is_clean(model) and same_state(before, state_of(model))


def test_a_disk_that_is_full_is_refused_with_numbers(dear, monkeypatch, tmp_path):
    model, batch = mlp(8, 64), torch.randn(512, 64)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10_000))

    with pytest.raises(TierError, match=r"has 9.77 KiB free, the plan moves .* there\.\nMake room"):
        lowtide.fit(model, batch, budget="40%", offload=lowtide.Offload(scratch_dir=tmp_path, disk_budget="1GiB"))
    assert is_clean(model)


def test_a_scratch_directory_in_memory_is_warned_about_and_works(dear, monkeypatch, tmp_path):
    model, batch = mlp(8, 64), torch.randn(512, 64)
    monkeypatch.setattr("lowtide.scratch_file.file_system", lambda path: "tmpfs")

    with pytest.warns(ScratchInMemoryWarning, match="which is memory"):
        fit = lowtide.fit(model, batch, budget="40%", offload=lowtide.Offload(scratch_dir=tmp_path))
    fit.remove()
    assert fit.plan.counts["disk_offload"] > 0


@pytest.mark.slow
def test_a_step_that_an_address_space_limit_kills_completes_with_the_disk_tier(tmp_path):
    spare_mib = 600  # threads reserve 64 MiB each of it
    assert limited(spare_mib) == "no memory\n"
    assert limited(spare_mib, "budget=10%", f"scratch_dir={tmp_path}") == "trained True\n"


def test_a_tier_that_was_left_to_us_and_that_fails_is_done_without(dear, monkeypatch):
    # On an accelerator "auto" is pinned host memory where there is some; a disk stands for it here.
    model, batch = mlp(8, 64), torch.randn(512, 64)
    monkeypatch.setattr("lowtide.api.usable", lambda *a, **k: {"disk": 2**30})

    def full(self, storage):
        raise TierError("64.00 KiB of host memory could not be pinned (CUDA error 2), 0 B are.\nLower host_budget=.")

    monkeypatch.setattr("lowtide.tape.offload.disk_tier.DiskTier.store", full)

    with lowtide.fit(model, batch, budget="50%", offload=lowtide.Offload(host_budget="auto")) as fit:
        assert fit.plan.tiers == frozenset() and fit.plan.counts["recompute"] > 0
        assert fit.warnings == [
            "planned without other tiers: 64.00 KiB of host memory could not be pinned (CUDA error 2), 0 B are."
        ]
    with pytest.raises(TierError, match="could not be pinned"):
        lowtide.fit(model, batch, budget="50%", offload=lowtide.Offload(host_budget=None))


def test_a_link_that_cannot_be_measured_and_was_left_to_us_is_done_without(monkeypatch):
    model, batch = mlp(8, 64), torch.randn(512, 64)
    monkeypatch.setattr("lowtide.api.usable", lambda *a, **k: {"disk": 2**30})
    monkeypatch.setattr("lowtide.measurement.links._known", {})

    def unpinned(*_):
        raise TierError("32.00 MiB of host memory could not be pinned: no.\nRaise the limit.")

    monkeypatch.setattr("lowtide.measurement.links._disk", unpinned)

    with lowtide.fit(model, batch, budget="50%", offload=lowtide.Offload(host_budget="auto")) as fit:
        assert fit.plan.tiers == frozenset() and "could not be pinned" in fit.warnings[0]


def test_fit_compares_what_comes_back_with_what_was_moved_before_it_attaches(dear, monkeypatch):
    model, batch = mlp(8, 64), torch.randn(512, 64)
    before = state_of(model)
    flip_a_bit(monkeypatch)

    with pytest.raises(TierError, match=r"the disk tier gave back other bits than it was given, for a tensor of shape"):
        lowtide.fit(model, batch, budget="40%", offload=lowtide.Offload(disk_budget="1GiB"))
    assert is_clean(model) and same_state(before, state_of(model))
