"""Random small programs for the fuzz tests: a model whose forward is a list of instructions on a pool of tensors.

Instructions are drawn one by one and tried on real tensors; one that plain PyTorch refuses is left out. What they do
to each other, in-place writes over what autograd stores included, is nobody's plan.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from support.unseen_memory import finish_work, memory_at
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

SIDE = 6  # tensors are mostly SIDE x SIDE, so that most of them fit together
Instruction = Callable[["Machine", list[torch.Tensor]], Any]


class SavesInput(Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a)
        return a * a.abs()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (a,) = ctx.saved_tensors
        return 2 * g * a.abs()


class SavesOutput(Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        out = a.clamp(-2, 2).exp()
        ctx.save_for_backward(out, a)
        return out

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        out, a = ctx.saved_tensors
        return g * out * (a.abs() < 2)


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        a.mul_(0.5)
        ctx.mark_dirty(a)
        return a

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 0.5


class OverwritesWhatItSaved(Function):
    """Backward overwrites its saved input, as some kernels do."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        own = a.sin()
        ctx.save_for_backward(own)
        return own * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (own,) = ctx.saved_tensors
        own.mul_(own).neg_().add_(1).clamp_(min=0).sqrt_()
        return g * own * 2


class RawPointer(Function):
    """Writes its result past the dispatcher."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        source = a.detach().contiguous().float()
        made = torch.empty_like(source)
        memory = memory_at(made).reshape(-1)
        memory[...] = memory_at(source).reshape(-1)
        memory[::3] = memory[::3] * 2 + 1
        ctx.save_for_backward(made)
        return made.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (made,) = ctx.saved_tensors
        return g * made


def _raw_write(m: Machine, t: list[torch.Tensor]) -> torch.Tensor:
    made = t[0].detach().contiguous() * 1.5
    memory_at(made).reshape(-1)[0] = 3.25
    return t[0] * made


def _swap_data(m: Machine, t: list[torch.Tensor]) -> torch.Tensor:
    t[0].data = t[0].data.t()
    return t[0].sin()  # read again: of one that is not, nobody can tell


def _swap_data_of_a_view(m: Machine, t: list[torch.Tensor]) -> torch.Tensor:
    view = t[0].view(t[0].shape)
    seen = view.cos()
    view.data = view.data.t()
    return view.sin() * seen


def _no_grad(m: Machine, t: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        made = (t[0] * t[1]).sigmoid()
    return made


def _out(m: Machine, t: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        into = torch.empty(SIDE, SIDE)
        torch.mul(t[0], t[1], out=into)
        torch.sin(into, out=into)
    return t[0] * into


def _resized(m: Machine, t: list[torch.Tensor]) -> torch.Tensor:
    made = t[0].detach().clone()
    made.resize_(SIDE * 2, SIDE // 2)
    return t[0].reshape(SIDE * 2, SIDE // 2) * made


def _batch_norm(m: Machine, t: list[torch.Tensor]) -> torch.Tensor:
    return F.batch_norm(t[0], m.mean, m.var, m.weight0[0], m.bias0, training=True)


def _counted(m: Machine, t: list[torch.Tensor]) -> torch.Tensor:
    m.count.add_(1)
    return t[0] * m.count


def _running(m: Machine, t: list[torch.Tensor]) -> torch.Tensor:
    m.running.mul_(0.9).add_(t[0].detach().mean(0) * 0.1)
    return t[0] - m.running


def _complex(m: Machine, t: list[torch.Tensor]) -> torch.Tensor:
    z = torch.complex(t[0], t[1])
    return (z * z.conj() + z.mul(1j)).imag


def _pairs(m: Machine, t: list[torch.Tensor]) -> torch.Tensor:
    z = torch.view_as_complex(t[0].reshape(SIDE, SIDE // 2, 2).contiguous())
    return torch.view_as_real(z * z).reshape(SIDE, SIDE)


def _masked(m: Machine, t: list[torch.Tensor]) -> torch.Tensor:
    picked = t[0][t[1] > 0]
    return t[0] * picked.sum()


def _checkpointed(m: Machine, t: list[torch.Tensor]) -> torch.Tensor:
    return checkpoint(lambda a: (a.sin() @ m.weight0).tanh(), t[0], use_reentrant=False)


def _attention(m: Machine, t: list[torch.Tensor]) -> torch.Tensor:
    q, k, v = (x.reshape(1, 1, SIDE, SIDE) for x in (t[0], t[1], t[2]))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2).reshape(SIDE, SIDE)


# How many operands; what is done. A result that is a tensor joins the pool.
INSTRUCTIONS: dict[str, tuple[int, Instruction]] = {
    "sin": (1, lambda m, t: t[0].sin()),
    "tanh": (1, lambda m, t: t[0].tanh()),
    "gelu": (1, lambda m, t: F.gelu(t[0])),
    "softmax": (1, lambda m, t: t[0].softmax(-1)),
    "norm": (1, lambda m, t: F.layer_norm(t[0], t[0].shape[-1:])),
    "cumsum": (1, lambda m, t: t[0].cumsum(-1) * 0.3),
    "half": (1, lambda m, t: t[0].to(torch.bfloat16).sin().float()),
    "mul": (2, lambda m, t: t[0] * t[1]),
    "add": (2, lambda m, t: t[0] + t[1]),
    "where": (3, lambda m, t: torch.where(t[0] > 0, t[1], t[2])),
    "maximum": (2, lambda m, t: torch.maximum(t[0], t[1])),
    "matmul": (2, lambda m, t: (t[0] @ t[1]) * 0.2),
    "weight0": (1, lambda m, t: t[0] @ m.weight0),
    "weight1": (1, lambda m, t: F.linear(t[0], m.weight1, m.bias0)),
    "shared weight": (1, lambda m, t: t[0] @ m.weight0.t()),
    "cat": (2, lambda m, t: torch.cat([t[0], t[1]])[::2]),
    "transpose": (1, lambda m, t: t[0].t()),
    "slice": (1, lambda m, t: t[0][1:, :-1]),
    "steps": (1, lambda m, t: t[0][::2]),
    "row": (1, lambda m, t: t[0][0].expand(SIDE, SIDE)),
    "flat": (1, lambda m, t: t[0].reshape(-1)),
    "square": (1, lambda m, t: t[0].reshape(-1)[: SIDE * SIDE].reshape(SIDE, SIDE)),
    "diagonal": (1, lambda m, t: t[0].diagonal().unsqueeze(0) * t[0]),
    "strided": (1, lambda m, t: t[0].as_strided((SIDE, 2), (1, SIDE))),
    "flip": (1, lambda m, t: t[0].flip(0)),
    "detach": (1, lambda m, t: t[0].detach() * t[0]),
    "chunks": (1, lambda m, t: torch.mul(*t[0].chunk(2, dim=-1))),
    "unbound": (1, lambda m, t: torch.stack(t[0].unbind(0)[::-1])),
    "index": (1, lambda m, t: t[0][torch.tensor([2, 0, 1, 2, 0, 1]) % t[0].shape[0]]),
    "sorted": (1, lambda m, t: t[0].sort(-1).values),
    "top": (1, lambda m, t: t[0].topk(2, -1).values.sum(-1, keepdim=True) * t[0]),
    "clone": (1, lambda m, t: t[0].clone()),
    "add_": (1, lambda m, t: t[0].add_(0.5)),
    "mul_": (2, lambda m, t: t[0].mul_(t[1])),
    "relu_": (1, lambda m, t: t[0].relu_()),
    "tanh_": (1, lambda m, t: t[0].tanh_()),
    "fresh relu_": (1, lambda m, t: (t[0] * 1.25).relu_()),
    "fresh add_": (2, lambda m, t: t[0].sin().add_(t[1])),
    "zero row": (1, lambda m, t: t[0][0].zero_()),
    "copy row": (2, lambda m, t: t[0][1].copy_(t[1][0])),
    "t_": (1, lambda m, t: t[0].t_()),
    "fill": (1, lambda m, t: t[0].masked_fill_(t[0] > 1, 0.25)),
    "index_add_": (2, lambda m, t: t[0].index_add_(0, torch.tensor([0, 2]), t[1][:2])),
    "data add_": (1, lambda m, t: t[0].data.add_(0.125)),
    "swap data": (1, _swap_data),
    "swap data of a view": (1, _swap_data_of_a_view),
    "dropout": (1, lambda m, t: F.dropout(t[0], 0.3)),
    "noise": (1, lambda m, t: t[0] + torch.rand_like(t[0])),
    "mask": (1, lambda m, t: t[0] * torch.empty(SIDE, SIDE).bernoulli_(0.7)),
    "normal": (1, lambda m, t: t[0] * torch.randn(SIDE, SIDE)),
    "no grad": (2, _no_grad),
    "out": (2, _out),
    "resized": (1, _resized),
    "batch norm": (1, _batch_norm),
    "counted": (1, _counted),
    "running": (1, _running),
    "complex": (2, _complex),
    "pairs": (1, _pairs),
    "masked": (2, _masked),
    "checkpointed": (1, _checkpointed),
    "attention": (3, _attention),
    "saves input": (1, lambda m, t: SavesInput.apply(t[0])),
    "saves output": (1, lambda m, t: SavesOutput.apply(t[0])),
    "in place function": (1, lambda m, t: InPlace.apply(t[0] * 1)),
    "overwrites": (1, lambda m, t: OverwritesWhatItSaved.apply(t[0])),
}
# Writes that no version shows: only the rehearsal of ``fit`` finds them.
INVISIBLE: dict[str, tuple[int, Instruction]] = {
    "raw pointer": (1, lambda m, t: RawPointer.apply(t[0])),
    "raw write": (1, _raw_write),
}


class Machine(nn.Module):
    """Runs ``program``: pairs of an instruction's name and the positions of its operands in the pool."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
        self.weight0 = nn.Parameter(torch.randn(SIDE, SIDE, generator=generator) * 0.5)
        self.weight1 = nn.Parameter(torch.randn(SIDE, SIDE, generator=generator) * 0.5)
        self.bias0 = nn.Parameter(torch.randn(SIDE, generator=generator))
        self.register_buffer("mean", torch.zeros(SIDE))
        self.register_buffer("var", torch.ones(SIDE))
        self.register_buffer("running", torch.zeros(SIDE))
        self.register_buffer("count", torch.zeros(()))
        self.program: list[tuple[str, tuple[int, ...]]] = []
        self.read: list[int] = []

    def step(self, pool: list[torch.Tensor], name: str, places: tuple[int, ...]) -> None:
        _, instruction = INSTRUCTIONS.get(name) or INVISIBLE[name]
        made = instruction(self, [pool[i] for i in places])
        if isinstance(made, torch.Tensor):
            pool.append(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pool = [x.sin(), x @ self.weight0]
        for name, places in self.program:
            self.step(pool, name, places)
        read = [pool[i] for i in self.read]
        return torch.stack([(t.float() * (0.5 + i)).tanh().mean() for i, t in enumerate(read)]).sum() + pool[1].mean()


def draw(seed: int, length: int, *, invisible: bool = False) -> tuple[Machine, torch.Tensor]:
    """A model and its batch, the same for the same arguments. Plain PyTorch runs its forward pass."""
    choose = random.Random(seed)
    names = [*INSTRUCTIONS, *(INVISIBLE if invisible else ())]
    machine, x = (
        Machine(seed),
        torch.randn(SIDE, SIDE, generator=torch.Generator(torch.get_default_device()).manual_seed(seed + 1)),
    )
    torch.manual_seed(seed)
    tried = Machine(seed)
    pool = [x.sin(), x @ tried.weight0]
    while len(machine.program) < length:
        name = choose.choice(list(INVISIBLE)) if invisible and not machine.program else choose.choice(names)
        count, _ = INSTRUCTIONS.get(name) or INVISIBLE[name]
        # Late tensors are picked more often: chains grow longer.
        places = tuple(min(len(pool) - 1, int(len(pool) * choose.random() ** 0.5)) for _ in range(count))
        known = len(pool)
        try:
            tried.step(pool, name, places)
            finish_work()
        except (RuntimeError, IndexError, TypeError, ValueError):
            del pool[known:]
            continue  # shapes that do not meet, a leaf or a view written in place: as plain PyTorch says
        machine.program.append((name, places))
    machine.read = sorted(choose.sample(range(len(pool)), k=min(len(pool), 3)))
    return machine, x
