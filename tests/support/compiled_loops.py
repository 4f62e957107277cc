"""Loops as nanoGPT and torchtitan have them, around compiled layers, with what each backward takes."""

from contextlib import nullcontext
from functools import partial

import torch
from support.compiled_layers import Block
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import lowtide
from lowtide.device import allocation_counter
from lowtide.measurement.allocator import peak_bytes
from lowtide.step.bits import same_bits
from lowtide.step.subclasses import plain_tensors

WORDS = 64
WITHIN = 0.94  # of the peak of the plain loop, of which most is weights and the optimizer's state


class GPT(nn.Module):
    """nanoGPT's: tied weights, the loss inside, and logits of the last position alone where nobody trains."""

    def __init__(self, layers=3, width=32):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(WORDS, width), "h": nn.ModuleList(Block(width) for _ in range(layers)),
            "ln_f": nn.LayerNorm(width),
        })  # fmt: skip
        self.lm_head = nn.Linear(width, WORDS, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids, targets=None):
        x = self.transformer.wte(ids)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class Transformer(nn.Module):
    """torchtitan's: layers by number in a dict, and the loss outside."""

    def __init__(self, layers=3, width=32):
        super().__init__()
        self.tok_embeddings, self.norm = nn.Embedding(WORDS, width), nn.LayerNorm(width)
        self.layers = nn.ModuleDict({str(i): Block(width) for i in range(layers)})
        self.output = nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


class Taken:
    """The peak of each call with its backward, in absolute bytes: counted here, or by the plan's own status."""

    def __init__(self, model, optimizer, compiled):
        self._model, self._optimizer, self._compiled, self.peaks = model, optimizer, compiled, []

    def run(self, step, *batch):
        if self._compiled is not None:  # whose watch may be on
            result = step()
            self.peaks.append(self._compiled.status().last_peak_bytes)
            return result
        found = []
        parameters = list(self._model.parameters())
        there = [*parameters, *(p.grad for p in parameters if p.grad is not None), *batch]
        there += [t for kept in self._optimizer.state.values() for t in kept.values() if isinstance(t, torch.Tensor)]
        before = sum(part.nbytes for tensor in there for part in plain_tensors(tensor))
        self.peaks.append(before + peak_bytes(lambda: found.append(step()), batch[0].device))
        return found[0]


def nanogpt(model, compiled=None, *, iterations=4, autocast=True):
    """Losses, weights and peaks of ``train.py``'s loop. It calls ``compiled``; default: the model."""
    run = compiled or model
    draws = torch.Generator().manual_seed(0)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    taken, losses, evaluated = Taken(model, optimizer, compiled), [], []

    def batch():
        ids = torch.randint(0, WORDS, (4, 33), generator=draws)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def context():
        return torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()

    def micro_step(x, y):
        with context():
            _, loss = run(x, y)
            loss = loss / 2
        scaler.scale(loss).backward()
        return loss.item()

    x, y = batch()
    for iteration in range(iterations):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (iteration + 1) / iterations
        if iteration % 2 == 0:
            model.eval()
            with torch.no_grad(), context():
                evaluated.append(run(*batch())[1].item())
            model.train()
        for _ in range(2):
            losses.append(taken.run(partial(micro_step, x, y), x, y))
            x, y = batch()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    assert len(evaluated) == (iterations + 1) // 2
    return losses, [p.detach().clone() for p in model.parameters()], taken.peaks


def torchtitan(model, compiled=None, *, steps=4):
    """As ``nanogpt``, of torchtitan's loop: the model is sharded, gradients are clipped across ranks."""
    run = compiled or model
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for layer in model.layers.values():
        fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    draws, taken, losses = (
        torch.Generator().manual_seed(torch.distributed.get_rank()),
        Taken(model, optimizer, compiled),
        [],
    )

    def micro_step(x, y):
        loss = F.cross_entropy(run(x).flatten(0, 1).float(), y.flatten(), reduction="sum") / y.numel() / 2
        loss.backward()
        return loss.item()

    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(2):
            ids = torch.randint(0, WORDS, (4, 33), generator=draws)
            x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            losses.append(taken.run(partial(micro_step, x, y), x, y))
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm.full_tensor())
        optimizer.step()
        scheduler.step()
    return losses, [part.detach().clone() for p in model.parameters() for part in plain_tensors(p)], taken.peaks


def torchtitan_of_rank(rank):
    """Both loops in each rank: of layers that PyTorch compiles, and of the same within a budget below their peak."""
    torch.set_num_threads(1)
    allocation_counter.prepare(waits=True)
    torch.manual_seed(0)
    plain, model = Transformer(), Transformer()
    model.load_state_dict(plain.state_dict())
    for layer in plain.layers.values():
        layer.compile(fullgraph=True, dynamic=False)
    losses, weights, peaks = torchtitan(plain)
    # gloo's threads free when they come to it, now and then after the next allocation.
    budget = int(WITHIN * max(min(peaks[2::2]), min(peaks[3::2])))
    torch._dynamo.reset()
    compiled = lowtide.compile(model, budget=budget)
    found = torchtitan(model, compiled)
    return {
        "equal": losses == found[0] and all(map(same_bits, weights, found[1])), "peaks": found[2], "budget": budget,
        "plans": [plan.layers for plan in compiled.plans], "status": compiled.status().to_dict(),
        "reason": compiled.reason,
    }  # fmt: skip
