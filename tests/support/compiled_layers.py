"""A tiny decoder for compiled layers and its steps, and the joint graph of a function without Inductor's code."""

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_function, make_boxed_compiler
from torch.nn import functional as F

from lowtide.compiled.joint_nodes import JointNodes
from lowtide.compiled.layer_graph import layer_graph
from lowtide.compiled.partitioner import PlannedPartitioner
from lowtide.step.bits import same_bits


class Block(nn.Module):
    """Attention and a wide layer, both with a residual; ``dropout`` between."""

    def __init__(self, width=32, dropout=0.0):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), dropout
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)


class Decoder(nn.Module):
    """Four blocks between an embedding and a head."""

    def __init__(self, layers=4, width=32, dropout=0.0, dtype=torch.float32):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.to(dtype)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


class Breaking(nn.Module):
    """No single graph can be made of it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.inner(x)


IDS = torch.randint(0, 64, (4, 32), generator=torch.Generator(torch.get_default_device()).manual_seed(0))


def decoder(**options):
    torch.manual_seed(0)
    model = Decoder(**options)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model


def step_of(run, model, ids=IDS):
    """Loss, gradients and the generator's state after one step."""
    for p in model.parameters():
        p.grad.zero_()
    torch.manual_seed(1)
    loss = run(ids)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters()), torch.get_rng_state()]


def equal(found, expected):
    return all(map(same_bits, found, expected))


def reference(round_as_eager=False, **options):
    """A step of the layers compiled by PyTorch alone."""
    model = decoder(**options)
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False, options={"emulate_precision_casts": round_as_eager})
    return step_of(model, model)


def layer_graph_of(function, *inputs):
    """The ``LayerGraph`` of ``function``, from AOTAutograd alone."""
    found = []

    def partition(gm, joint_inputs, *, num_fwd_outputs, **options):
        def seen(graph, info, values, num_fwd_outputs):
            nodes = JointNodes(graph, info.is_required_fw, num_fwd_outputs)
            found.append(layer_graph(nodes, torch.device("cpu")))

        return PlannedPartitioner(None, seen)(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)

    compiler = make_boxed_compiler(lambda gm, example_inputs: gm)
    aot_function(function, fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(*inputs)
    return found[0]
