"""The partitioner obeys a plan, and PyTorch's cache can tell plans apart."""

import pickle

import pytest
import torch
from torch._functorch import config
from torch._functorch.aot_autograd import aot_function, make_boxed_compiler

from lowtide.compiled.partitioner import BudgetedChoices, ChoicesFoundError, PlannedPartitioner
from lowtide.errors import PlanMismatchError


def parts_of(function, saved, *inputs):
    """Names of the nodes of forward and backward, partitioned so."""
    parts = []

    def compiler(gm, example_inputs):
        parts.append([n.name for n in gm.graph.nodes if n.op == "call_function"])
        return make_boxed_compiler(lambda g, i: g)(gm, example_inputs)

    partition = PlannedPartitioner(saved)
    out = aot_function(function, fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(*inputs)
    out.sum().backward()
    return parts


def chain(x):
    return x.exp().sin().tanh()


def test_what_is_not_saved_is_computed_again_in_backward():
    x = torch.randn(8, requires_grad=True)

    _, nothing = parts_of(chain, (), x)
    _, all_three = parts_of(chain, ("exp", "sin", "tanh"), x)

    assert {"exp", "sin", "tanh"} <= set(nothing)
    assert not {"exp", "sin", "tanh"} & set(all_three)


def test_choices_are_what_pytorch_saves_under_each_memory_budget():
    def layers(x, *weights):
        for weight in weights:
            x = x + (x @ weight).tanh() @ weight
        return x

    def run(partition):
        inputs = [torch.randn(64, 64, requires_grad=True) for _ in range(4)]
        compiler = make_boxed_compiler(lambda g, i: g)
        aot_function(layers, fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(*inputs)

    def saved_under(budget):
        found = []
        with config.patch(activation_memory_budget=budget):
            run(PlannedPartitioner(None, lambda graph, info, values, num_outputs: found.append(values)))
        return [n.name for n in found[0]]

    choices = BudgetedChoices()
    with pytest.raises(ChoicesFoundError):
        run(choices)
    found = [[n.name for n in values] for values in choices.found]

    assert found == [saved_under(tenths / 10) for tenths in range(1, 10)]
    assert len(set(map(tuple, found))) > 2


def test_an_identity_belongs_to_one_plan():
    identities = {PlannedPartitioner(saved).uuid() for saved in (None, (), ("a",), ("a", "b"), ("ab",))}

    assert len(identities) == 5
    assert PlannedPartitioner(("b", "a")).uuid() == PlannedPartitioner(("a", "b"), lambda *seen: None).uuid()


def test_the_cache_can_pickle_it_whoever_watches():
    copy = pickle.loads(pickle.dumps(PlannedPartitioner(("a",), lambda *seen: None)))

    assert copy.uuid() == PlannedPartitioner(("a",)).uuid()


def test_a_plan_of_another_layer_is_refused_by_name():
    with pytest.raises(PlanMismatchError, match="the plan saves softmax, which the compiled layer does not have"):
        parts_of(chain, ("softmax",), torch.randn(8, requires_grad=True))


def test_a_draw_is_not_made_again():
    def noisy(x):
        return x.exp() * torch.rand_like(x)

    x = torch.randn(8, requires_grad=True)
    with pytest.raises(PlanMismatchError, match="backward would draw rand_like anew"):
        parts_of(noisy, (), x)
    assert "rand_like" not in parts_of(noisy, ("rand_like",), x)[1]
