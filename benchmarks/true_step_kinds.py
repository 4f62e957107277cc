"""Kinds of training steps as people write them, for ``true_steps.py``: each makes a model and a step to call again.

A kind is a function of ``checkpointed`` (its blocks run under ``torch.utils.checkpoint``) that returns a ``Training``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, TOKENS, BLOCKS = 128, 2048, 6


@dataclass
class Training:
    """One training.

    Attributes:
        step: Runs step ``i`` and returns its losses: ``lowtide.fit`` sees nothing else of it.
        optimizers: Whose states count as resident.
        measured: What of a step counts: the context manager that the step enters around forward and backward.
    """

    model: nn.Module
    step: Callable[[int], list[torch.Tensor]]
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    batch: list[torch.Tensor] = field(default_factory=list)
    measured: Callable[[], Any] = nullcontext


@dataclass(frozen=True)
class Kind:
    """One kind of step.

    Attributes:
        what: In words, for the page.
        checkpoints: ``torch.utils.checkpoint`` works for it.
        ends_late: What backward leaves of the graph keeps the step open until the next one's call.
        of_plain: The budget is that much of the plain peak; None: what ``true_steps.py`` says.
    """

    name: str
    what: str
    make: Callable[[bool], Training]
    checkpoints: bool = True
    of_plain: float | None = None
    ends_late: bool = False


KINDS: list[Kind] = []


def kind(
    what: str, *, checkpoints: bool = True, of_plain: float | None = None, ends_late: bool = False
) -> Callable[[Callable[[bool], Training]], Callable[[bool], Training]]:
    def add(make: Callable[[bool], Training]) -> Callable[[bool], Training]:
        KINDS.append(Kind(make.__name__, what, make, checkpoints, of_plain, ends_late))
        return make

    return add


# -- models ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block; ``smooth``: twice differentiable."""

    def __init__(self, width: int = WIDTH, *, dropout: float = 0.0, inner: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner * width), nn.Linear(inner * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks between two linear layers."""

    def __init__(
        self, checkpointed: bool, ins: int = WIDTH, outs: int = WIDTH, *, blocks: list[nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.first, self.last = nn.Linear(ins, WIDTH), nn.Linear(WIDTH, outs)
        self.blocks = nn.ModuleList(blocks or [Block() for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.last(x)


def data(i: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(i), device="cpu")
    return (scale * numbers).to(torch.get_default_device())


def usual(
    checkpointed: bool, *, net: nn.Module | None = None, optimizer: Callable[..., Any] | None = None,
    set_to_none: bool = True, accumulate: int = 1, autocast: bool = False, tokens: Callable[[int], int] | None = None,
    after: Callable[[nn.Module], None] | None = None,
) -> Training:  # fmt: skip
    """Forward, mean squared error, backward, step, ``zero_grad``."""
    model = net or Net(checkpointed)
    stepped = (optimizer or (lambda p: torch.optim.SGD(p, lr=1e-2)))([p for p in model.parameters() if p.requires_grad])
    training = Training(model, lambda i: [], [stepped])

    def step(i: int) -> list[torch.Tensor]:
        losses = []
        for part in range(accumulate):
            x = data(accumulate * i + part, TOKENS if tokens is None else tokens(i), WIDTH)
            y = x.roll(1, 1)
            training.batch = [x, y]
            with training.measured():
                with torch.autocast(torch.get_default_device().type, torch.bfloat16) if autocast else nullcontext():
                    loss = F.mse_loss(model(x), y) / accumulate
                loss.backward()
            losses.append(loss.detach())
        if after is not None:
            after(model)
        stepped.step()
        stepped.zero_grad(set_to_none=set_to_none)
        return losses

    training.step = step
    return training


# -- gradients ------------------------------------------------------------------------------------------------------


@kind("backward makes the gradients (`zero_grad()`)")
def gradients_made(checkpointed: bool) -> Training:
    return usual(checkpointed)


@kind("gradients stay (`zero_grad(set_to_none=False)`)")
def gradients_stay(checkpointed: bool) -> Training:
    return usual(checkpointed, set_to_none=False)


@kind("two micro-batches")
def accumulated(checkpointed: bool) -> Training:
    return usual(checkpointed, accumulate=2)


@kind("weights are most of the memory; 1 % above the plain peak", of_plain=1.01)
def weight_heavy(checkpointed: bool) -> Training:
    return usual(
        checkpointed, net=Net(checkpointed, blocks=[Block(inner=16) for _ in range(BLOCKS)]), tokens=lambda i: 64
    )


@kind("autocast to bfloat16")
def autocast(checkpointed: bool) -> Training:
    return usual(checkpointed, autocast=True)


@kind("autocast, two micro-batches")
def autocast_accumulated(checkpointed: bool) -> Training:
    return usual(checkpointed, autocast=True, accumulate=2)


@kind("half of the weights are frozen")
def frozen(checkpointed: bool) -> Training:
    net = Net(checkpointed)
    for p in net.blocks[: BLOCKS // 2].parameters():
        p.requires_grad_(False)
    net.first.requires_grad_(False)
    return usual(checkpointed, net=net)


@kind("frozen weights are thawed in mid-training", checkpoints=False)
def thawed(checkpointed: bool) -> Training:
    net = Net(checkpointed)
    net.first.requires_grad_(False)
    net.blocks[0].requires_grad_(False)
    training = usual(checkpointed, net=net, optimizer=lambda p: torch.optim.SGD(net.parameters(), lr=1e-2))
    plain = training.step

    def step(i: int) -> list[torch.Tensor]:
        if i == 5:
            net.requires_grad_(True)
        return plain(i)

    training.step = step
    return training


@kind("a hook replaces `.grad`")
def hook_replaces(checkpointed: bool) -> Training:
    def normalised(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad = p.grad / (p.grad.norm() + 1e-6)

    net = Net(checkpointed)
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(normalised)
    return usual(checkpointed, net=net)


@kind("`backward(inputs=...)`", ends_late=True)
def some_inputs(checkpointed: bool) -> Training:
    model = Net(checkpointed)
    some = [p for n, p in model.named_parameters() if "blocks.4" in n or "blocks.5" in n or "last" in n]
    optimizer = torch.optim.SGD(some, lr=1e-2)
    training = Training(model, lambda i: [], [optimizer])

    def step(i: int) -> list[torch.Tensor]:
        x = data(i, TOKENS, WIDTH)
        training.batch = [x]
        with training.measured():
            loss = F.mse_loss(model(x), x)
            loss.backward(inputs=some)
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach()]

    training.step = step
    return training


# -- optimizers -----------------------------------------------------------------------------------------------------


@kind("AdamW, whose state comes with the first step")
def adamw(checkpointed: bool) -> Training:
    return usual(checkpointed, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))


@kind("Adafactor")
def adafactor(checkpointed: bool) -> Training:
    return usual(checkpointed, optimizer=lambda p: torch.optim.Adafactor(p, lr=1e-3))


@kind("gradients clipped by their norm")
def clipped(checkpointed: bool) -> Training:
    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return usual(checkpointed, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), after=clip)


def in_backward(model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """One optimizer a parameter, which steps as soon as its gradient is complete and frees it."""
    optimizers = {p: make([p]) for p in model.parameters() if p.requires_grad}

    def step_at_once(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step_at_once)
    return list(optimizers.values())


def stepping_in_backward(checkpointed: bool, make: Callable[..., torch.optim.Optimizer]) -> Training:
    model = Net(checkpointed)
    training = Training(model, lambda i: [], in_backward(model, make))

    def step(i: int) -> list[torch.Tensor]:
        x = data(i, TOKENS, WIDTH)
        training.batch = [x]
        with training.measured():
            loss = F.mse_loss(model(x), x)
            loss.backward()
        return [loss.detach()]

    training.step = step
    return training


@kind("optimizer in backward, SGD (LOMO)")
def sgd_in_backward(checkpointed: bool) -> Training:
    return stepping_in_backward(checkpointed, lambda p: torch.optim.SGD(p, lr=1e-2))


@kind("optimizer in backward, AdamW (torchtune)")
def adamw_in_backward(checkpointed: bool) -> Training:
    return stepping_in_backward(checkpointed, lambda p: torch.optim.AdamW(p, lr=1e-3))


# -- second derivatives and several backwards -----------------------------------------------------------------------


def custom(
    model: nn.Module, losses: Callable[[int, Training], Iterator[torch.Tensor]], *, optimizer: Any = None
) -> Training:
    """A step whose losses are made, and run backward, by a generator."""
    stepped = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)
    training = Training(model, lambda i: [], [stepped])

    def step(i: int) -> list[torch.Tensor]:
        with training.measured():
            found = [loss.detach() for loss in losses(i, training)]
        stepped.step()
        stepped.zero_grad()
        return found

    training.step = step
    return training


@kind("gradient penalty (WGAN-GP)")
def gradient_penalty(checkpointed: bool) -> Training:
    critic = Net(checkpointed, outs=1)

    def losses(i: int, training: Training) -> Iterator[torch.Tensor]:
        real, fake = data(i, TOKENS, WIDTH), data(i + 1000, TOKENS, WIDTH)
        training.batch = [real, fake]
        mixed = (0.5 * (real + fake)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        loss = critic(fake).mean() - critic(real).mean() + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
        loss.backward()
        yield loss

    return custom(critic, losses)


@kind("R1 penalty on real data")
def r1_penalty(checkpointed: bool) -> Training:
    critic = Net(checkpointed, outs=1)

    def losses(i: int, training: Training) -> Iterator[torch.Tensor]:
        real = data(i, TOKENS, WIDTH).requires_grad_()
        training.batch = [real]
        scores = critic(real)
        (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        loss = F.softplus(-scores).mean() + 5 * slope.square().sum(1).mean()
        loss.backward()
        yield loss

    return custom(critic, losses)


class Energy(nn.Module):
    """Energy of atoms, and the forces as its derivative, made inside the model."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.net = Net(checkpointed, ins=3, outs=1)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = positions.requires_grad_()
        energy = self.net(positions).sum()
        (slope,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, -slope


@kind("force field: forces are derivatives of the energy")
def force_field(checkpointed: bool) -> Training:
    model = Energy(checkpointed)

    def losses(i: int, training: Training) -> Iterator[torch.Tensor]:
        positions, forces = data(i, TOKENS, 3), data(i + 1000, TOKENS, 3)
        training.batch = [positions, forces]
        energy, found = model(positions)
        loss = 1e-6 * energy.square() + F.mse_loss(found, forces)
        loss.backward()
        yield loss

    return custom(model, losses)


class Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


@kind("physics-informed: the loss goes on after inner derivatives")
def physics_informed(checkpointed: bool) -> Training:
    model = Net(checkpointed, ins=2, outs=1, blocks=[Tanh() for _ in range(BLOCKS)])

    def losses(i: int, training: Training) -> Iterator[torch.Tensor]:
        at = data(i, TOKENS, 2).requires_grad_()
        edge = data(i + 1000, TOKENS // 4, 2)
        training.batch = [at, edge]
        u = model(at)
        (du,) = torch.autograd.grad(u.sum(), at, create_graph=True)
        (ddu,) = torch.autograd.grad(du[:, 0].sum(), at, create_graph=True)
        residual = du[:, 1:] + u * du[:, :1] - 0.01 * ddu[:, :1]
        loss = residual.square().mean() + model(edge).square().mean()
        loss.backward()
        yield loss

    return custom(model, losses)


@kind("L-BFGS, which calls a closure several times a step")
def lbfgs(checkpointed: bool) -> Training:
    model = Net(checkpointed, blocks=[Tanh() for _ in range(BLOCKS)])
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-2, max_iter=3, history_size=2)
    training = Training(model, lambda i: [], [optimizer])

    def step(i: int) -> list[torch.Tensor]:
        x = data(0, TOKENS, WIDTH)
        training.batch = [x]
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            with training.measured():
                loss = F.mse_loss(model(x), x.roll(1, 1))
                loss.backward()
            losses.append(loss.detach())
            return loss

        optimizer.step(closure)
        return losses

    training.step = step
    return training


@kind("Hessian-vector product (AdaHessian)", ends_late=True)
def hessian_vector(checkpointed: bool) -> Training:
    model = Net(checkpointed)
    parameters = list(model.parameters())

    def losses(i: int, training: Training) -> Iterator[torch.Tensor]:
        x = data(i, TOKENS, WIDTH)
        training.batch = [x]
        loss = F.mse_loss(model(x), x)
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        signs = [torch.ones_like(g) for g in grads]
        products = torch.autograd.grad(grads, parameters, signs)
        for p, g, h in zip(parameters, grads, products):
            p.grad = g.detach() + 1e-3 * h
        yield loss

    return custom(model, losses)


@kind("MAML: the loss after one inner step", ends_late=True)
def maml(checkpointed: bool) -> Training:
    model = Net(checkpointed, blocks=[Tanh() for _ in range(BLOCKS)])

    def losses(i: int, training: Training) -> Iterator[torch.Tensor]:
        seen, unseen = data(i, TOKENS, WIDTH), data(i + 1000, TOKENS, WIDTH)
        training.batch = [seen, unseen]
        weights = dict(model.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(model, weights, seen), seen.roll(1, 1))
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: p - 0.01 * g for (name, p), g in zip(weights.items(), grads)}
        loss = F.mse_loss(torch.func.functional_call(model, moved, unseen), unseen.roll(1, 1))
        loss.backward()
        yield loss

    return custom(model, losses)


@kind("two losses, two backwards with `retain_graph`", ends_late=True)
def two_losses(checkpointed: bool) -> Training:
    model = Net(checkpointed, outs=2 * WIDTH)

    def losses(i: int, training: Training) -> Iterator[torch.Tensor]:
        x = data(i, TOKENS, WIDTH)
        training.batch = [x]
        left, right = model(x).chunk(2, 1)
        one, two = F.mse_loss(left, x), F.l1_loss(right, x)
        one.backward(retain_graph=True)
        two.backward()
        yield one
        yield two

    return custom(model, losses)


@kind("losses weighed by their gradients' norms (`grad` each, then backward)", ends_late=True)
def balanced_losses(checkpointed: bool) -> Training:
    model = Net(checkpointed, outs=2 * WIDTH)
    shared = model.blocks[-1].down.weight

    def losses(i: int, training: Training) -> Iterator[torch.Tensor]:
        x = data(i, TOKENS, WIDTH)
        training.batch = [x]
        left, right = model(x).chunk(2, 1)
        parts = [F.mse_loss(left, x), F.l1_loss(right, x)]
        norms = [torch.autograd.grad(part, shared, retain_graph=True)[0].norm() for part in parts]
        loss = sum(part / (norm + 1e-6) for part, norm in zip(parts, norms))
        loss.backward()
        yield loss

    return custom(model, losses)


# -- what is written, drawn, held -----------------------------------------------------------------------------------


@kind("dropout")
def dropout(checkpointed: bool) -> Training:
    return usual(checkpointed, net=Net(checkpointed, blocks=[Block(dropout=0.1) for _ in range(BLOCKS)]))


class Convolved(nn.Module):
    """Convolution, batch normalisation with its running statistics, an activation in place."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 5, padding=2)
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, 16, WIDTH)
        return x + F.relu(self.norm(self.conv(rows)), inplace=True).view_as(x)


@kind("batch normalisation, activations in place", checkpoints=False)
def written_in_place(checkpointed: bool) -> Training:
    return usual(checkpointed, net=Net(checkpointed, blocks=[Convolved() for _ in range(BLOCKS)]))


class SwiGLU(torch.autograd.Function):
    """A custom Function that stores its inputs and returns more than it stores."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * F.silu(gate)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        return x + self.down(SwiGLU.apply(self.gate(hidden), self.up(hidden)))


@kind("custom autograd Functions")
def custom_functions(checkpointed: bool) -> Training:
    return usual(checkpointed, net=Net(checkpointed, blocks=[Gated() for _ in range(BLOCKS)]))


@kind("the caller holds the model's output through backward")
def held_output(checkpointed: bool) -> Training:
    model = Net(checkpointed, outs=16 * WIDTH)

    def losses(i: int, training: Training) -> Iterator[torch.Tensor]:
        x = data(i, TOKENS, WIDTH)
        numbers = torch.Generator().manual_seed(i)
        target = torch.randint(16 * WIDTH, (TOKENS,), generator=numbers, device="cpu").to(x.device)
        training.batch = [x, target]
        logits = model(x)
        loss = F.cross_entropy(logits, target)
        loss.backward()
        yield loss
        accuracy = (logits.detach().argmax(1) == target).float().mean()
        yield accuracy

    return custom(model, losses)


@kind("attention")
def attention(checkpointed: bool) -> Training:
    layers = [
        nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(BLOCKS)
    ]
    return usual(checkpointed, net=_Rows(checkpointed, layers))


class _Rows(Net):
    """Rows of 128 tokens."""

    def __init__(self, checkpointed: bool, blocks: list[nn.Module]) -> None:
        super().__init__(checkpointed, blocks=blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(-1, 128, WIDTH)).view_as(x)


@kind("two lengths in turn")
def two_lengths(checkpointed: bool) -> Training:
    return usual(checkpointed, tokens=lambda i: (TOKENS, TOKENS // 2)[i % 2])


@kind("evaluation between steps")
def evaluated(checkpointed: bool) -> Training:
    def evaluate(model: nn.Module) -> None:
        model.eval()
        with torch.no_grad():
            model(data(999, TOKENS, WIDTH))
        model.train()

    return usual(checkpointed, after=evaluate)


@kind("DDP, gradients in buckets")
def data_parallel(checkpointed: bool) -> Training:
    _process_group()
    return usual(checkpointed, net=nn.parallel.DistributedDataParallel(Net(checkpointed), gradient_as_bucket_view=True))


@kind("FSDP2, each block gathered")
def fully_sharded(checkpointed: bool) -> Training:
    from torch.distributed.fsdp import fully_shard

    _process_group()
    net = Net(checkpointed)
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    return usual(checkpointed, net=net)


def _process_group() -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
