"""A device that tells less, or does less: what it lacks is said by name, and the rest works without it."""

import pytest
import torch
from support.cached_tokens import KV
from support.training_steps import drop_everything, mlp

import lowtide
from lowtide.device import streams
from lowtide.training.budget import StepBudget

STATISTICS = (
    "memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
    "reset_peak_memory_stats", "reset_accumulated_memory_stats", "get_memory_info",
)  # fmt: skip


def missing(*args, **kwargs):
    raise NotImplementedError("this device has no such thing")


@pytest.fixture
def no_statistics(device, monkeypatch):
    for name in STATISTICS:
        monkeypatch.setattr(torch.accelerator, name, missing)
    monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", missing)  # which ``memory_stats`` asks
    yield
    monkeypatch.undo()  # before the fixtures that look at them


@pytest.fixture
def no_streams(device, monkeypatch):
    monkeypatch.setattr(streams, "new_stream", missing)


def test_verify_compares_bits_where_no_peak_can_be_measured(no_statistics):
    model, batch = mlp(4, 32).to("standin"), torch.randn(64, 32, device="standin")
    plan = drop_everything(lowtide.trace(model, batch))
    proof = lowtide.verify(model, batch, plan, rounds=0)

    assert proof.equal and proof.dropped_ops
    assert proof.measured_peak_bytes is proof.plain_peak_bytes is None
    assert "peak not measured, predicted" in str(proof)
    assert str(proof).endswith("the allocator of standin keeps no statistics: peaks were not measured")


def test_a_fit_is_reported_where_no_peak_can_be_measured(no_statistics):
    model, batch = mlp(4, 32).to("standin"), torch.randn(64, 32, device="standin")
    with lowtide.fit(model, batch, budget="70%", offload=lowtide.Offload(host_budget=None)) as fit:
        model(batch).square().mean().backward()
        assert fit.verify(batch).equal
        report = fit.report()
    assert next(row for line in report.splitlines() if (row := line.split())[:1] == ["measured"])[1:3] == ["-", "-"]


def test_what_a_step_has_made_is_not_taken_off_what_is_resident_where_nobody_counts_it_there(no_statistics):
    model = mlp(4, 32).to("standin")
    budget = StepBudget(model, 1 << 20)

    assert not budget.counts_all and budget.resident_bytes > 4096
    assert (
        budget.for_step(model, (), made_bytes=4096) == (1 << 20) - budget.resident_bytes == budget.for_step(model, ())
    )


def test_a_cache_waits_for_layers_where_nothing_is_copied_beside_the_computation(no_streams, caplog):
    transformers = pytest.importorskip("transformers")
    from lowtide.inference import LayerOffloadCache

    config = transformers.LlamaConfig(**{**KV, "num_hidden_layers": 4})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to("standin")
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = None
    ids = torch.randint(1, config.vocab_size, (2, 6)).to("standin")

    def generated(cache):
        mask = torch.ones_like(ids)
        tokens = model.generate(
            ids, attention_mask=mask, past_key_values=cache, do_sample=False, max_new_tokens=8, use_cache=True
        )
        return tokens.cpu()

    cache = LayerOffloadCache(config, budget=3 * 2 * 2 * 2 * 17 * 8 * 4)
    assert torch.equal(generated(None), generated(cache)) and cache.moved_bytes
    told = "standin has no streams (this device has no such thing): layers that are away are waited for"
    assert [told in record.getMessage() for record in caplog.records].count(True) == 1
