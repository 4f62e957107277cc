"""What settings mean: the plan against the checkpointed step itself, and which tensors it makes again."""

from functools import partial

import pytest
import torch

import lowtide
from lowtide.graph.costs import HOST, Costs, Link
from lowtide.settings import checkpointing_names
from lowtide.settings.carried_out import carried_out, carrier, why_not
from lowtide.settings.frameworks import describe
from lowtide.settings.settings_plan import plan_of
from lowtide.side_by_side import SideBySide, Way

from .conftest import LAYERS, decoder, layers_of, recomputed

FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}


def meant(traced, framework, settings):
    return plan_of(traced.graph, traced.costs, describe(traced.model, settings, framework))


def kwargs(**values):
    return {"activation_checkpointing": True, "activation_checkpointing_kwargs": values}


def difference(traced, framework, settings):
    """Predicted peak of the mapped plan against the measured one of the library's own checkpoints, and who ran them."""
    found = meant(traced, framework, settings)
    assert why_not(found.description, traced.model) == ""
    bench = SideBySide(traced.model, traced.batch, None, traced.graph)
    real = bench.peak_bytes(Way("real", around=partial(carried_out, found.description, traced.model)))
    return found.plan.predicted_peak_bytes / real - 1, carrier(found.description, traced.model)


@pytest.mark.parametrize(
    ("framework", "settings", "by"),
    [
        ("transformers", kwargs(), "transformers"),
        ("transformers", kwargs(every_n_layers=2), "transformers"),
        ("transformers", kwargs(every_n_layers=3, use_reentrant=False), "transformers"),
        ("trl", {}, "transformers"),
        ("megatron", FULL | {"recompute_method": "block", "recompute_num_layers": 3}, "torch.utils.checkpoint"),
        ("megatron", SELECTIVE | {"recompute_modules": ["mlp"]}, "torch.utils.checkpoint"),
        ("torchtitan", {"mode": "selective", "selective_ac_option": "2"}, "torch.utils.checkpoint"),
        ("accelerate", {"fsdp_config": {"fsdp_activation_checkpointing": True}}, "torch.utils.checkpoint"),
    ],
)
def test_the_plan_has_the_peak_of_the_checkpointed_step(llama, framework, settings, by):
    off, who = difference(llama, framework, settings)

    assert abs(off) < 0.01 and who == by


@pytest.mark.parametrize(
    ("framework", "settings", "most"),
    [
        ("transformers", kwargs(use_reentrant=True), 0.05),
        ("trl", {"gradient_checkpointing_kwargs": {"selective": True}}, 0.15),
        ("torchtitan", {"mode": "selective", "selective_ac_option": "op"}, 0.15),
    ],
)
def test_where_a_checkpoint_holds_more_than_backward_needs_the_plan_is_lower(llama, framework, settings, most):
    off, _ = difference(llama, framework, settings)

    assert -most < off < 0


@pytest.mark.parametrize(
    ("framework", "settings", "layers"),
    [
        ("transformers", kwargs(every_n_layers=2), {0, 2}),
        ("transformers", kwargs(every_n_layers=9), {0}),
        ("transformers", {"gradient_checkpointing": True}, {0, 1, 2, 3}),
        ("transformers", {"activation_checkpointing": False, "gradient_checkpointing": True}, set()),
        ("trl", {"gradient_checkpointing": False}, set()),
        ("roll", {"model_args": {"disable_gradient_checkpointing": True}}, set()),
        ("roll", FULL, {0, 1, 2, 3}),
        ("megatron", FULL | {"recompute_method": "block", "recompute_num_layers": 1}, {0}),
        ("megatron", {"--recompute-granularity": "full", "--recompute-method": "block",
                      "--recompute-num-layers": "2"}, {0, 1}),
        ("colossalai", {"gradient_checkpointing_ratio": 0.6}, {0, 1}),
        ("colossalai", {"num_ckpt_layers_per_stage": [1, 1]}, {0, 2}),
        ("colossalai", {"num_ckpt_layers_per_stage": [2, 0], "num_layers_per_stage": [3, 1]}, {0, 1}),
        ("torchtitan", {"activation_checkpoint": {"mode": "selective", "selective_ac_option": 2}}, {1, 3}),
        ("torchtitan", {"mode": "none"}, set()),
        ("torch", {"modules": "model.layers.2"}, {2}),
        ("deepspeed", {"activation_checkpointing": {"cpu_checkpointing": True}}, set()),
    ],
)  # fmt: skip
def test_the_checkpointed_layers(llama, framework, settings, layers):
    assert layers_of(meant(llama, framework, settings).plan) == layers


def test_uniform_keeps_one_input_for_each_group_of_layers(llama):
    peaks = {}
    for size in (1, 2, 4):
        settings = FULL | {"recompute_method": "uniform", "recompute_num_layers": size}
        plan = meant(llama, "megatron", settings).plan
        hidden = 4 * 64 * 64 * 4  # batch, tokens, hidden size, float32
        borders = [d for d in plan.decisions if d.action == "save" and d.bytes == hidden and "layers" in plan.scope(d)]
        peaks[size] = len({plan.scope(d).split(".")[2] for d in borders})

    assert peaks[1] == LAYERS and peaks[2] == LAYERS / 2 and peaks[4] == 1


@pytest.mark.parametrize(("module", "part"), [("mlp", ".mlp"), ("layernorm", "layernorm")])
def test_a_part_of_every_layer_is_made_again_and_nothing_else(llama, module, part):
    plan = meant(llama, "megatron", SELECTIVE | {"recompute_modules": [module]}).plan

    assert layers_of(plan) == set(range(LAYERS))
    assert all(part in path for path in recomputed(plan))


def test_layernorm_also_makes_its_output_again(llama):
    plan = meant(llama, "megatron", SELECTIVE | {"recompute_modules": ["layernorm"]}).plan
    last = [d for d in plan.decisions if d.stored and plan.scope(d) == "model.layers.1.input_layernorm"][-1]

    assert last.action == "recompute"


def test_core_attention_is_the_products_and_what_lies_between(eager_llama):
    plan = meant(eager_llama, "megatron", SELECTIVE).plan
    ops = {plan.ops[d.op].name.split(".")[1] for d in plan.decisions if d.action == "recompute" and d.stored}

    assert all(path.endswith("self_attn") for path in recomputed(plan))
    assert "_softmax" in ops and not ops & {"mm", "neg", "cos"}  # projections and rotary embedding are kept


def test_selective_keeps_the_listed_outputs(llama):
    ops = ["mm", "_scaled_dot_product_flash_attention_for_cpu"]
    plan = meant(llama, "torch", {"save_ops": ops}).plan
    every_second = meant(llama, "torchtitan", {"mode": "selective", "selective_ac_option": "op"}).plan

    dropped = {plan.ops[d.op].name.split(".")[1] for d in plan.decisions if d.action == "recompute"}
    assert not dropped & set(ops) and "silu" in dropped
    products = [d for d in every_second.decisions if every_second.ops[d.op].name == "aten.mm.default"]
    assert {"save", "recompute"} == {d.action for d in products}


def test_experts_are_moe_and_not_mlp(mixtral):
    moe = meant(mixtral, "megatron", SELECTIVE | {"recompute_modules": ["moe", "mlp"]})

    assert recomputed(moe.plan) and all(".mlp" in path or "moe" in path for path in recomputed(moe.plan))
    assert 'mlp: does nothing: the model has no dense MLP; its experts are "moe"' in map(str, moe.description.findings)


def test_a_module_that_is_called_twice_is_two_checkpoints():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh())
                for _ in range(2)
            )

        def forward(self, x):
            for layer in self.layers:
                x = layer(layer(x))
            return x

    model, x = Twice(), torch.randn(32, 16)
    plan = lowtide.from_settings(model, {"modules": ["layers.0", "layers.1"]}, framework="torch", batch=x)
    saved = [d for d in plan.decisions if d.action == "save" and plan.scope(d).startswith("layers")]

    assert len(saved) == 4  # what each of the four calls hands on


def test_what_a_plan_cannot_make_again_inside_a_checkpoint_is_told():
    class Writing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(16, 16)

        def forward(self, x):
            hidden = self.inner(x)
            out = hidden.sigmoid()
            hidden.mul_(2)  # sigmoid has read what is gone now
            return out + hidden.detach()

    model, x = torch.nn.Sequential(Writing(), Writing()), torch.randn(64, 16)
    plan = lowtide.from_settings(model, {"modules": ["0", "1"]}, framework="torch", batch=x)

    assert "inside checkpoints cannot be made again op by op" in plan.provenance["settings_findings"]
    assert plan.counts["recompute"] == 0


def test_with_a_link_the_inputs_of_layers_move(llama):
    costs = Costs(llama.costs.op_ms, links={HOST: Link(1e9, 1e9)})
    description = describe(llama.model, kwargs(offload=True), "transformers")
    plan = plan_of(llama.graph, costs, description).plan
    moved = [d for d in plan.decisions if d.action == "cpu_offload"]

    assert [d.bytes for d in moved] == [4 * 64 * 64 * 4] * LAYERS
    assert plan.predicted_step_ms > meant(llama, "transformers", kwargs()).plan.predicted_step_ms


def test_activation_offloading_moves_what_stays_stored(llama):
    costs = Costs(llama.costs.op_ms, links={HOST: Link(1e9, 1e9)})
    settings = {"gradient_checkpointing": False, "activation_offloading": True}
    plan = plan_of(llama.graph, costs, describe(llama.model, settings, "trl")).plan

    assert plan.counts["recompute"] == 0 and plan.counts["cpu_offload"] > plan.counts["save"]


def test_a_budget_of_the_compiler_bounds_the_stored_bytes(llama):
    found = meant(llama, "torch", {"activation_memory_budget": 0.3})
    stored = sum(found.plan.bytes_by_action.values())

    assert 0.2 < found.plan.bytes_by_action["save"] / stored < 0.45
    assert "does nothing in an eager step" in str(found.description.findings[0])


def test_from_settings_gives_a_plan_that_is_proven_whatever_the_model_has_switched_on():
    model, batch = decoder(num_hidden_layers=2)
    checkpointing_names.enable(model, every_n_layers=2)
    before = [m.gradient_checkpointing for m in model.model.layers]
    settings = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
    plan = lowtide.from_settings(model, settings, framework="transformers", batch=batch)

    assert [m.gradient_checkpointing for m in model.model.layers] == before == [True, False]
    assert layers_of(plan) == {0, 1}
    assert plan.provenance["settings"] == "transformers checkpoints all layers, 2 of 2"
    assert plan.provenance["settings_findings"] == ""
    model.gradient_checkpointing_disable()
    model.disable_input_require_grads()
    proof = lowtide.verify(model, batch, plan, rounds=0)
    assert proof.equal and proof.measured_peak_bytes <= plan.predicted_peak_bytes


@pytest.mark.parametrize("framework", ["transformers", "accelerate"])
def test_what_is_switched_on_to_measure_is_switched_off_again(framework):
    model, _ = decoder()
    description = describe(model, {"activation_checkpointing": True}, framework)

    def state():
        kept = {n: {k: v for k, v in vars(m).items() if "checkpointing" in k or k == "forward"} for n, m in named}
        return kept, len(model.get_input_embeddings()._forward_hooks)

    named = list(model.named_modules())
    before = state()
    with carried_out(description, model):
        assert state() != before

    assert state() == before
