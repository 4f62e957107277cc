"""Training steps to test a planner on: many architectures, random weights, about a second on one CPU thread.

    python benchmarks/cases.py                           what there is
    python benchmarks/cases.py --dump tests/graphs       trace and time them, and write what solvers work from

Sizes are chosen so that activations set the peak, as in real training, and not parameters. What matters is the
variety of structure: a single stack of layers, two stacks, stages of different sizes, skips across the whole model,
modules called twice, shapes that depend on values, random ops, casts, frozen weights, hundreds of layers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SEED = 0


@dataclass(frozen=True)
class Case:
    """A model, a batch for it, and ``step(model, batch)``, the loss."""

    model: nn.Module
    batch: Any
    step: Callable[[nn.Module, Any], torch.Tensor]
    facts: str


def build(name: str, *, quick: bool = False) -> Case:
    """The case ``name``, the same weights and batch each time; ``quick``: a toy of the same kind."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(SEED)
    case = CASES[name](quick)
    case.model.train()
    return case


def own_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The loss alone: a caller that held the whole output would keep the logits through backward."""
    return model(**batch).loss


def llama(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int, rows: int, tokens: int
) -> Case:
    """A Llama-architecture decoder."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    facts = f"Llama, {layers} layers, hidden {hidden}, vocabulary {vocabulary}, batch {rows} x {tokens}"
    return Case(model, _text(vocabulary, rows, tokens), own_loss, facts)


def _text(vocabulary: int, rows: int, tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (rows, tokens))
    return {"input_ids": ids, "labels": ids}


def decoder8(vocabulary: int, quick: bool) -> Case:
    """The decoder of ``decoder.py``."""
    return llama(2, 64, 176, 4, 2, vocabulary, 4, 64) if quick else llama(8, 512, 1408, 8, 4, vocabulary, 4, 512)


def decoder32(quick: bool) -> Case:
    return llama(4 if quick else 32, 256, 704, 8, 4, 512, 2, 256)


def decoder100(quick: bool) -> Case:
    """``decoder8``'s proportions, thin and deep."""
    return llama(5 if quick else 100, 128, 352, 8, 4, 512, 2, 128)


def decoder126(quick: bool) -> Case:
    """Llama 3.1 405B's proportions and its 126 layers, 1/128 as wide: the graph is as large as the real one's."""
    return llama(6 if quick else 126, 128, 416, 16, 1, 1024, 2, 128)


def moe(quick: bool) -> Case:
    """Mixtral: which tokens an expert gets, and so its shapes, depend on values."""
    import transformers

    layers = 2 if quick else 6
    config = transformers.MixtralConfig(
        hidden_size=256, num_hidden_layers=layers, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4,
        num_local_experts=8, num_experts_per_tok=2, vocab_size=512, use_cache=False, output_router_logits=True,
        attn_implementation="sdpa", experts_implementation="eager",
    )  # fmt: skip
    batch = _text(512, 2, 64 if quick else 256)
    return Case(transformers.MixtralForCausalLM(config), batch, own_loss, f"Mixtral, {layers} layers of 8 experts")


def t5(quick: bool) -> Case:
    """Two stacks: every decoder layer reads the encoder's output. Dropout everywhere, a tied loss head."""
    import transformers

    layers = 2 if quick else 6
    config = transformers.T5Config(
        d_model=256, d_ff=1024, d_kv=32, num_heads=8, num_layers=layers, num_decoder_layers=layers, vocab_size=1024,
        dropout_rate=0.1, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    batch = _text(1024, 4, 32 if quick else 128)
    return Case(transformers.T5ForConditionalGeneration(config), batch, own_loss, f"T5, {layers} + {layers} layers")


def vit(quick: bool) -> Case:
    import transformers

    layers, size = (2, 64) if quick else (12, 224)
    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=layers, num_attention_heads=3, intermediate_size=768, image_size=size,
        patch_size=16, num_labels=100,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(8, 3, size, size), "labels": torch.randint(0, 100, (8,))}
    return Case(transformers.ViTForImageClassification(config), batch, own_loss, f"ViT-Ti/16, {layers} layers")


def resnet(quick: bool) -> Case:
    """ResNet-50: four stages of different sizes, BatchNorm in training mode, convolutions with large workspace."""
    import transformers

    depths, size = ([1, 1, 1, 1], 64) if quick else ([3, 4, 6, 3], 160)
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[128, 256, 512, 1024], depths=depths, num_labels=100
    )
    batch = {"pixel_values": torch.randn(8, 3, size, size), "labels": torch.randint(0, 100, (8,))}
    return Case(transformers.ResNetForImageClassification(config), batch, own_loss, f"ResNet, depths {depths}")


def unet(quick: bool) -> Case:
    """Skip connections across the whole model: the last stage reads the first stage's output."""
    size = 32 if quick else 128
    model = UNet(width=16, depth=2 if quick else 4)
    batch = (torch.randn(6, 3, size, size), torch.randn(6, 3, size, size))
    return Case(model, batch, _denoise, f"U-Net, images {size} x {size}")


def _denoise(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class UNet(nn.Module):
    """Ronneberger, Fischer and Brox 2015, https://arxiv.org/abs/1505.04597, with GroupNorm and SiLU."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(_conv_block(widths[i], widths[i + 1]) for i in range(depth))
        self.middle = _conv_block(widths[-1], widths[-1])
        self.up = nn.ModuleList(_conv_block(2 * widths[i + 1], widths[i]) for i in reversed(range(depth)))
        self.leave = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        skips = []
        for block in self.down:
            skips.append(block(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2, mode="nearest"), skips.pop()], dim=1))
        return self.leave(x)


def _conv_block(inner: int, outer: int) -> nn.Sequential:
    def half(width: int) -> list[nn.Module]:
        return [nn.Conv2d(width, outer, 3, padding=1), nn.GroupNorm(8, outer), nn.SiLU()]

    return nn.Sequential(*half(inner), *half(outer))


def autocast(quick: bool) -> Case:
    """A Llama under bf16 autocast: each weight and activation is cast, and bf16 kernels have other workspace."""
    case = llama(2 if quick else 6, 256, 704, 8, 4, 512, 4, 256)
    return replace(case, step=_autocast_loss, facts=f"{case.facts}, bf16 autocast")


def _autocast_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return own_loss(model, batch)


def lora(quick: bool) -> Case:
    """PEFT's LoRA on a Llama: frozen weights, adapters on all projections, dropout before them."""
    import peft

    case = llama(2 if quick else 8, 256, 704, 8, 4, 512, 4, 256)
    settings = peft.LoraConfig(r=8, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
    return replace(case, model=peft.get_peft_model(case.model, settings), facts=f"{case.facts}, LoRA of rank 8")


def minilm(quick: bool) -> Case:
    """MiniLM-L6's shape: a BERT encoder with dropout, called twice in a step by a contrastive loss."""
    import transformers

    layers, rows = (2, 4) if quick else (6, 16)
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=layers, num_attention_heads=12, intermediate_size=1536, vocab_size=1024
    )
    ids = torch.randint(0, 1024, (rows, 64))
    batch = {"input_ids": ids, "attention_mask": (torch.arange(64) < torch.randint(32, 65, (rows, 1))).long()}
    return Case(transformers.BertModel(config), batch, _contrast, f"BERT encoder, {layers} layers, called twice")


def _contrast(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """SimCSE: a contrastive loss on two embeddings of each sentence that differ by dropout only."""
    real = batch["attention_mask"].unsqueeze(-1).float()

    def embed() -> torch.Tensor:
        return F.normalize((model(**batch).last_hidden_state * real).sum(1) / real.sum(1), dim=-1)

    similarity = embed() @ embed().T / 0.05
    return F.cross_entropy(similarity, torch.arange(len(similarity)))


def toy(quick: bool) -> Case:
    """Pre-norm blocks with every operation written out, for which other planners' numbers are known."""
    blocks = 2 if quick else 8
    model = nn.Sequential(*(Block(256, heads=4, inner=672) for _ in range(blocks)))
    return Case(model, torch.randn(2, 256, 256), _total, f"{blocks} pre-norm blocks, attention written out")


def _total(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


class Block(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x)); no biases, no mask."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.Parameter(torch.ones(width))
        self.before_mlp = nn.Parameter(torch.ones(width))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(_rms_norm(x, self.before_attention))
        h = _rms_norm(x, self.before_mlp)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def chain48(quick: bool) -> Case:
    """The chain of the textbooks: equal layers, no branches."""
    layers = 6 if quick else 48
    model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(256, 256), nn.Tanh())))
    return Case(model, torch.randn(2048, 256), _total, f"{layers} x (Linear, Tanh)")


CASES: dict[str, Callable[[bool], Case]] = {
    "decoder8_512": lambda quick: decoder8(512, quick),
    "decoder8_4096": lambda quick: decoder8(4096, quick),
    "decoder32": decoder32,
    "decoder100": decoder100,
    "decoder126": decoder126,
    "moe": moe,
    "t5": t5,
    "vit": vit,
    "resnet": resnet,
    "unet": unet,
    "autocast": autocast,
    "lora": lora,
    "minilm": minilm,
    "toy": toy,
    "chain48": chain48,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--dump", type=Path, help="folder for graphs, costs and expected.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.cases:
        case = build(name)
        said = dump(name, case, args.dump) if args.dump else ""
        print(f"{name:<15} {case.facts}{said}", flush=True)
    return 0


def dump(name: str, case: Case, folder: Path) -> str:
    """Write ``name``'s graph and costs into ``folder``, and what they should give into its ``expected.json``."""
    import lowtide
    from lowtide.graph import json_format
    from lowtide.measurement.allocator import peak_bytes
    from lowtide.step.restore import preserve_training_state

    traced = lowtide.trace(case.model, case.batch, step=case.step)
    costs = lowtide.measure(traced)
    # Signatures say how to time an op, and are most of the file. Their numbers stay: equal ones take equal time.
    graph = replace(traced, signatures=tuple({} for _ in traced.signatures))
    with preserve_training_state(case.model, case.batch):
        measured = peak_bytes(lambda: case.step(case.model, case.batch).backward())
    folder.mkdir(parents=True, exist_ok=True)
    json_format.save(graph, folder / f"{name}.json.gz")
    # Four digits are more than a clock gives, and half the file.
    costs = replace(costs, op_ms=tuple(float(f"{ms:.4g}") for ms in costs.op_ms))
    json_format.save_costs(costs, folder / f"{name}.costs.json.gz")
    path = folder / "expected.json"
    expected = json.loads(path.read_text()) if path.exists() else {}
    expected[name] = {
        "facts": case.facts,
        "fingerprint": graph.fingerprint,
        "ops": len(graph.ops),
        "simulated_plain_peak_bytes": lowtide.simulate(
            graph, costs, lowtide.solve(graph, costs, method="none")
        ).peak_bytes,
        "measured_plain_peak_bytes": graph.resident_bytes + measured,
    }
    path.write_text(json.dumps(expected, indent=2, sort_keys=True) + "\n")
    return f": {expected[name]}"


if __name__ == "__main__":
    sys.exit(main())
