"""Training loops as people write them, for ``real_steps.py``: each takes a model and a probe, returns its losses."""

from __future__ import annotations

import logging
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from step_probe import Probe
from torch import nn

SEED = 0
VOCABULARY = 1024
NUM_LENGTHS = 60  # distinct ones in the padded batches

Sizes = list[tuple[int, ...]]


@dataclass(frozen=True)
class Loop:
    """One case.

    Attributes:
        make: The model.
        sizes: Of every batch of a run with so many optimizer steps.
        train: ``(model, probe, sizes) -> losses``.
        steps: Optimizer steps.
        varies: Sizes differ: worth comparing with one fixed plan.
        ranks: Processes that train it together.
    """

    name: str
    make: Callable[[], nn.Module]
    sizes: Callable[[int], Sizes]
    train: Callable[[nn.Module, Probe, Sizes], list[float]]
    steps: int
    quick_steps: int = 6
    varies: bool = False
    ranks: int = 1


def llama(hidden: int = 128) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        hidden_size=hidden, num_hidden_layers=4, intermediate_size=hidden * 43 // 16, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, use_cache=False, attn_implementation="sdpa", pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def tokens(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


# -- the Trainer of transformers --------------------------------------------------------------------------------

ROWS = 4  # of a padded batch
ACCUMULATED = 2


def padded_lengths(steps: int) -> Sizes:
    """Lengths of padded batches: sixty distinct ones, in random order."""
    lengths = [12 + 3 * n for n in range(NUM_LENGTHS)]
    order = random.Random(SEED)
    return [(order.choice(lengths),) for _ in range(steps * ACCUMULATED)]


def trained(model: nn.Module, probe: Probe, sizes: Sizes, **settings: Any) -> list[float]:
    """The losses of ``transformers.Trainer``, those of its evaluations last."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    losses: list[float] = []

    class Probed(transformers.Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            with probe.step(inputs, inputs["input_ids"].shape[1]):
                loss = super().training_step(model, inputs, *args, **kwargs)
            losses.append(loss.item())
            return loss

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, use_cpu=True, seed=SEED, max_steps=len(sizes) // ACCUMULATED, learning_rate=1e-3,
            per_device_train_batch_size=ROWS, per_device_eval_batch_size=ROWS, save_strategy="no", report_to=[],
            gradient_accumulation_steps=ACCUMULATED, logging_strategy="no", disable_tqdm=True, **settings,
        )  # fmt: skip
        train, held_out = examples(sizes), examples([(180,), (90,)])
        trainer = Probed(model, arguments, train_dataset=train, eval_dataset=held_out, data_collator=padded)
        trainer.train()
    return losses + [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def examples(sizes: Sizes) -> list[torch.Tensor]:
    """Rows of tokens; the first of each batch is the longest."""
    order = random.Random(SEED + 1)
    found = []
    for at, (length,) in enumerate(sizes):
        lengths = [length, *(order.randint(length // 2, length) for _ in range(ROWS - 1))]
        found += [tokens(n, seed=ROWS * at + row) for row, n in enumerate(lengths)]
    return found


def padded(rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=0)
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trainer_with_evaluation(model: nn.Module, probe: Probe, sizes: Sizes) -> list[float]:
    return trained(model, probe, sizes, eval_strategy="steps", eval_steps=50)


def label_smoothing(model: nn.Module, probe: Probe, sizes: Sizes) -> list[float]:
    return trained(model, probe, sizes, label_smoothing_factor=0.1)


# -- a graph network --------------------------------------------------------------------------------------------


class MessagePassing(nn.Module):
    """Messages along edges, added up at their ends, with a residual: six rounds."""

    def __init__(self, features: int = 64, rounds: int = 6) -> None:
        super().__init__()
        self.features = features
        self.messages = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * features, features), nn.SiLU(), nn.Linear(features, features))
            for _ in range(rounds)
        )
        self.updates = nn.ModuleList(nn.Linear(2 * features, features) for _ in range(rounds))
        self.norms = nn.ModuleList(nn.LayerNorm(features) for _ in range(rounds))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        for message, update, norm in zip(self.messages, self.updates, self.norms, strict=True):
            sent = message(torch.cat([x[source], x[target]], -1))
            received = torch.zeros_like(x).index_add(0, target, sent)
            x = norm(x + F.silu(update(torch.cat([x, received], -1))))
        return x


def graph_sizes(steps: int) -> Sizes:
    """Nodes and edges; hardly two steps alike."""
    order = random.Random(SEED)
    nodes = [order.randint(200, 1200) for _ in range(steps)]
    return [(n, int(n * order.uniform(3, 6))) for n in nodes]


def graphs(model: nn.Module, probe: Probe, sizes: Sizes) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for at, (nodes, edges) in enumerate(sizes):
        generator = torch.Generator().manual_seed(at)
        x = torch.randn(nodes, model.features, generator=generator)
        ends = torch.randint(0, nodes, (2, edges), generator=generator)
        with probe.step((x, ends), edges):
            loss = F.mse_loss(model(x, ends), x.flip(0))
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


# -- policy optimisation ----------------------------------------------------------------------------------------

GROUP = 8  # completions of one prompt
NEW_TOKENS = 12


def prompt_lengths(steps: int) -> Sizes:
    order = random.Random(SEED)
    return [(order.choice((52, 76, 100)),) for _ in range(steps)]


def log_probabilities(model: nn.Module, ids: torch.Tensor, start: int) -> torch.Tensor:
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, start - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, ids[:, start:, None]).squeeze(-1)


def policy_optimisation(model: nn.Module, probe: Probe, sizes: Sizes) -> list[float]:
    """As in GRPO: completions are sampled within the step; two calls of the policy, one of the reference, one loss."""
    torch.manual_seed(SEED + 1)
    reference = type(model)(model.config)
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for at, (length,) in enumerate(sizes):
        prompt = tokens(1, length, seed=at).expand(GROUP, -1).contiguous()
        with probe.step(prompt, length):
            with torch.no_grad():
                completed = model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), do_sample=True, use_cache=True, pad_token_id=0,
                    min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS,
                )  # fmt: skip
                anchor = log_probabilities(reference, completed, length)
            halves = completed.split(GROUP // 2)
            ours = torch.cat([log_probabilities(model, half, length) for half in halves])
            rewards = (completed[:, length:] % 2 == 0).float().mean(1)
            advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            ratio = (ours - ours.detach()).exp()
            distance = (anchor - ours).exp() - (anchor - ours) - 1
            loss = (0.04 * distance - ratio * advantage[:, None]).mean()
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


# -- plain loops ------------------------------------------------------------------------------------------------


def one_length(steps: int) -> Sizes:
    return [(160,)] * steps


def chunked_loss(model: nn.Module, probe: Probe, sizes: Sizes) -> list[float]:
    """The loss is computed outside the model, from its logits, 64 positions at a time."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for at, (length,) in enumerate(sizes):
        ids = tokens(ROWS, length, seed=at)
        with probe.step(ids, length):
            logits = model(input_ids=ids).logits[:, :-1]
            parts = zip(logits.split(64, 1), ids[:, 1:].split(64, 1), strict=True)
            total = sum(F.cross_entropy(part.flatten(0, 1), to.flatten(), reduction="sum") for part, to in parts)
            loss = total / ids[:, 1:].numel()
            del logits, total
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Encoder(nn.Module):
    """Four layers with dropout."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        layer = nn.TransformerEncoderLayer(hidden, nhead=4, dim_feedforward=4 * hidden, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=4)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(ids)))


def accumulated(steps: int) -> Sizes:
    return [(128,)] * (4 * steps)


def autocast(model: nn.Module, probe: Probe, sizes: Sizes) -> list[float]:
    """Gradients of four batches are added up, under autocast to bfloat16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(SEED + 2)
    losses = []
    for at, (length,) in enumerate(sizes):
        ids = tokens(ROWS, length, seed=at)
        with probe.step(ids, length):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) / 4
            loss.backward()
        losses.append(loss.item())
        if at % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def of_this_rank(steps: int) -> Sizes:
    """Each rank has lengths of its own."""
    order = random.Random(SEED + int(os.environ.get("RANK", 0)))
    return [(order.choice((96, 112, 128)) + 16 * int(os.environ.get("RANK", 0)),) for _ in range(steps)]


def data_parallel(model: nn.Module, probe: Probe, sizes: Sizes) -> list[float]:
    wrapped = nn.parallel.DistributedDataParallel(model)
    probe.bucket_bytes = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(SEED + 3 + int(os.environ["RANK"]))
    losses = []
    for at, (length,) in enumerate(sizes):
        ids = tokens(ROWS, length, seed=1000 * int(os.environ["RANK"]) + at)
        # Once, after the first backward, the reducer makes its buckets anew. That is nobody's activation memory.
        wrapped.reducer._rebuild_buckets()
        with probe.step(ids, length):
            loss = F.cross_entropy(wrapped(ids).flatten(0, 1), ids.flatten())
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


LOOPS = (
    Loop("trainer", llama, padded_lengths, trainer_with_evaluation, steps=200, varies=True),
    Loop("graph network", MessagePassing, graph_sizes, graphs, steps=150, varies=True),
    Loop("policy optimisation", llama, prompt_lengths, policy_optimisation, steps=40),
    Loop("loss outside", llama, one_length, chunked_loss, steps=60),
    Loop("label smoothing", llama, padded_lengths, label_smoothing, steps=50, varies=True),
    Loop("autocast", Encoder, accumulated, autocast, steps=20, quick_steps=2),
    Loop("data parallel", Encoder, of_this_rank, data_parallel, steps=60, ranks=2),
    # The same with steps of some 0.3 s: what costs the same for each op, whatever its size, is less beside those.
    Loop("trainer, wide", partial(llama, 512), padded_lengths, trainer_with_evaluation, steps=100, varies=True),
    Loop("graph network, wide", partial(MessagePassing, 256), graph_sizes, graphs, steps=150, varies=True),
    Loop("policy optimisation, wide", partial(llama, 512), prompt_lengths, policy_optimisation, steps=40),
    Loop("label smoothing, wide", partial(llama, 512), padded_lengths, label_smoothing, steps=50, varies=True),
    Loop("data parallel, wide", partial(Encoder, 512), of_this_rank, data_parallel, steps=60, ranks=2),
)
