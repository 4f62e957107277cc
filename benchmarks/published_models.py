"""Models of published measurements, small and our own: what decides memory and time is as the sources describe it.

Decoders by their shape (``Shape``), with what adapters and 4-bit layers make them keep; vision transformers; a linear
layer with its loss. Values are nobody's: they are built and traced without memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lowtide.foresight.quantized_layers import FourBitProduct, expansion_of

BITSANDBYTES = "0.41.1"  # with which the 4-bit rows were measured
_QUANTIZED_BLOCK = 64  # weights that share a scale
_NESTED_BLOCK = 256  # scales that share one, in double quantisation
_PROMPT = 10  # tokens of a LLaMA-Adapter's prompt
_PLAIN_LAYERS = 2  # that have none


@dataclass(frozen=True)
class Shape:
    """A decoder.

    Attributes:
        rotary: Part of each head that is rotated.
        parallel: Attention and MLP read the same input, and their results are added.
        shared_norm: They have one norm.
        gated: An MLP of three matrices with SiLU; else two with GELU (``gelu``: which).
        rms: RMSNorm in float32; else LayerNorm. ``narrow``: its weight is multiplied in the input's dtype.
        tied: The head is the embedding.
        rope_dtype: Of the tables of the rotary positions.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    groups: int
    hidden: int
    rotary: float = 1.0
    parallel: bool = False
    shared_norm: bool = False
    gated: bool = True
    rms: bool = True
    narrow: bool = False
    bias: bool = False
    head_bias: bool = False
    tied: bool = False
    gelu: str = "none"
    rope_dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Tuning:
    """What is trained beside frozen layers, and how those are stored.

    Attributes:
        method: ``full``, ``lora`` (queries and values), ``adapter`` or ``adapter_v2``.
        bits: 16, or 4 for quantised layers; ``nested``: their scales are quantised too.
    """

    method: str = "full"
    bits: int = 16
    nested: bool = False
    rank: int = 8
    dropout: float = 0.05


class FourBitLinear(nn.Module):
    """Packed weights with a float32 scale for each 64 of them, or scales of a byte with scales of their own."""

    def __init__(self, given: int, made: int, tuning: Tuning) -> None:
        super().__init__()
        self.shape, self.expansion = (made, given), expansion_of(BITSANDBYTES)
        scales = given * made // _QUANTIZED_BLOCK
        self.register_buffer("packed", torch.zeros(given * made // 2, 1, dtype=torch.uint8))
        # As integers of their size: a model's ``to(bfloat16)`` leaves them as they are.
        self.register_buffer("scales", torch.zeros(scales, dtype=torch.uint8 if tuning.nested else torch.int32))
        if tuning.nested:
            nested = math.ceil(scales / _NESTED_BLOCK)
            self.register_buffer("scales_of_scales", torch.zeros(nested, dtype=torch.int32))

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        made: torch.Tensor = FourBitProduct.apply(x, self.packed, bias, self.shape, self.expansion)
        return made


class Linear(nn.Module):
    """A linear layer that may be frozen, of 4 bits, and scaled and shifted (LLaMA-Adapter V2)."""

    def __init__(self, given: int, made: int, bias: bool, tuning: Tuning) -> None:
        super().__init__()
        self.base = FourBitLinear(given, made, tuning) if tuning.bits == 4 else nn.Linear(given, made, bias=False)
        self.bias = nn.Parameter(torch.zeros(made)) if bias else None
        self.scaled = tuning.method == "adapter_v2"
        if self.scaled:
            self.adapter_scale, self.adapter_shift = nn.Parameter(torch.ones(made)), nn.Parameter(torch.zeros(made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.base, nn.Linear):
            y = functional.linear(x, self.base.weight, self.bias)
        else:
            y = self.base(x, self.bias)
        return self.adapter_scale * (y + self.adapter_shift) if self.scaled else y


class _AdaptedQkv(nn.Module):
    """Queries, keys and values in one layer; LoRA on queries and values, which is put between zeros for the keys."""

    def __init__(self, shape: Shape, tuning: Tuning) -> None:
        super().__init__()
        self.kv = shape.width // shape.heads * shape.groups
        self.width, self.made = shape.width, shape.width + 2 * self.kv
        self.base = Linear(shape.width, self.made, shape.bias, tuning)
        self.lora_down = nn.Parameter(torch.zeros(2 * tuning.rank, shape.width))
        self.lora_up = nn.Parameter(torch.zeros(shape.width + self.kv, tuning.rank))
        self.dropout, self.rank = nn.Dropout(tuning.dropout), tuning.rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        low = functional.linear(self.dropout(x), self.lora_down).transpose(-2, -1)
        if self.width == self.kv:
            high = functional.conv1d(low, self.lora_up.unsqueeze(-1), groups=2)
        else:
            parts = zip(low.chunk(2, dim=1), self.lora_up.split((self.width, self.kv)), strict=True)
            high = torch.cat([functional.conv1d(a, b.unsqueeze(-1)) for a, b in parts], dim=1)
        by_token = high.transpose(-2, -1).transpose(0, 1)
        where = torch.cat([torch.arange(self.width), torch.arange(self.width + self.kv, self.made)]).to(x.device)
        rows = by_token.new_zeros(*by_token.shape[:-1], self.made).view(-1, self.made)
        filled = rows.index_copy(1, where, by_token.reshape(-1, self.width + self.kv))
        return y + filled.view(*by_token.shape[:-1], self.made).transpose(0, 1) * 2.0


class RmsNorm(nn.Module):
    """In float32, and cast back."""

    def __init__(self, width: int, narrow: bool) -> None:
        super().__init__()
        self.weight, self.narrow = nn.Parameter(torch.ones(width)), narrow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return normed.to(x.dtype) * self.weight if self.narrow else (self.weight * normed).to(x.dtype)


def _norm(shape: Shape) -> nn.Module:
    return RmsNorm(shape.width, shape.narrow) if shape.rms else nn.LayerNorm(shape.width)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, elements: int) -> torch.Tensor:
    turned = x[..., :elements]
    first, second = turned[..., : elements // 2], turned[..., elements // 2 :]
    turned = (turned * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)
    return torch.cat((turned, x[..., elements:]), dim=-1)


class _Attention(nn.Module):
    def __init__(self, shape: Shape, tuning: Tuning, prompted: bool) -> None:
        super().__init__()
        self.shape, self.size, self.prompted = shape, shape.width // shape.heads, prompted
        made = shape.width + 2 * self.size * shape.groups
        self.qkv = (
            _AdaptedQkv(shape, tuning) if tuning.method == "lora" else Linear(shape.width, made, shape.bias, tuning)
        )
        self.out = Linear(shape.width, shape.width, shape.bias, tuning)
        if prompted:
            self.adapter_prompt = nn.Embedding(_PROMPT, shape.width)
            self.adapter_gate = nn.Parameter(torch.zeros(1, 1, shape.heads, 1))

    def _split(self, x: torch.Tensor) -> list[torch.Tensor]:
        shape, (rows, tokens) = self.shape, x.shape[:2]
        each = shape.heads // shape.groups
        parts = x.view(rows, tokens, shape.groups, each + 2, self.size).permute(0, 2, 3, 1, 4).split((each, 1, 1), 2)
        wide = (rows, shape.groups, each, tokens, self.size)
        return [part.expand(wide).reshape(rows, -1, tokens, self.size) for part in parts]

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = self._split(self.qkv(x))
        elements = int(self.shape.rotary * self.size)
        q, k = _rotated(q, cos, sin, elements), _rotated(k, cos, sin, elements)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.prompted:
            _, k, v = self._split(self.qkv(self.adapter_prompt.weight.reshape(1, _PROMPT, -1)))
            mask = torch.ones(x.shape[1], _PROMPT, dtype=torch.bool, device=x.device)
            y = y + self.adapter_gate * functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
        return self.out(y.reshape(x.shape))


class _Mlp(nn.Module):
    def __init__(self, shape: Shape, tuning: Tuning) -> None:
        super().__init__()
        self.up, self.down = (Linear(a, b, shape.bias, tuning)
                              for a, b in ((shape.width, shape.hidden), (shape.hidden, shape.width)))  # fmt: skip
        self.gate = Linear(shape.width, shape.hidden, shape.bias, tuning) if shape.gated else None
        self.gelu = partial(functional.gelu, approximate=shape.gelu)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is not None:
            gate = self.gate(x)
            return self.down(functional.silu(gate) * self.up(x))
        return self.down(self.gelu(self.up(x)))


class _Block(nn.Module):
    def __init__(self, shape: Shape, tuning: Tuning, prompted: bool) -> None:
        super().__init__()
        self.parallel = shape.parallel
        self.norm = _norm(shape)
        self.attention = _Attention(shape, tuning, prompted)
        self.norm_2 = None if shape.shared_norm else _norm(shape)
        self.mlp = _Mlp(shape, tuning)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        h = self.attention(normed, cos, sin)
        if self.parallel:
            return self.mlp(normed if self.norm_2 is None else self.norm_2(x)) + h + x
        assert self.norm_2 is not None
        x = h + x
        return self.mlp(self.norm_2(x)) + x


class Decoder(nn.Module):
    """Logits of tokens, whole or in ``chunk`` tokens at a time."""

    def __init__(
        self, shape: Shape, tokens: int, tuning: Tuning = Tuning(), *, chunk: int = 0,
        recompute: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.chunk, self.recompute, trained = chunk, recompute, _TRAINED[tuning.method]
        prompted = tuning.method in ("adapter", "adapter_v2")
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(_Block(shape, tuning, prompted and i >= _PLAIN_LAYERS) for i in range(shape.layers))
        self.norm = _norm(shape)
        self.head = Linear(shape.width, shape.vocabulary, shape.head_bias, tuning)
        if shape.tied:
            self.head.base.weight = self.embedding.weight
        elements = int(shape.rotary * (shape.width // shape.heads))
        self.register_buffer("cos", torch.empty(tokens, elements, dtype=shape.rope_dtype), persistent=False)
        self.register_buffer("sin", torch.empty(tokens, elements, dtype=shape.rope_dtype), persistent=False)
        if tuning.method != "full":
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(any(word in name for word in trained))

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin) if self.recompute is None else self.recompute(block)(x, self.cos, self.sin)
        x = self.norm(x)
        return [self.head(part) for part in x.split(self.chunk, dim=1)] if self.chunk else self.head(x)


_TRAINED = {"full": (), "lora": ("lora",), "adapter": ("adapter",), "adapter_v2": ("adapter", "norm")}


def whole_block(block: Callable[..., Any]) -> Callable[..., Any]:
    """``block`` under activation checkpointing."""
    return lambda *args: checkpoint(block, *args, use_reentrant=False)


class InFloat32(nn.Module):
    """What Lightning Fabric does to a model: its floating-point outputs are cast to float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        made = self.module(*args)
        return [part.float() for part in made] if isinstance(made, list) else made.float()


class LearnedPositions(nn.Module):
    """MosaicML's MPT with learned positions, biases and a head that is the embedding."""

    def __init__(self, width: int, heads: int, layers: int, tokens: int, vocabulary: int, recompute: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(PreNormBlock(width, heads, 4 * width, causal=True) for _ in range(layers))
        self.norm, self.recompute = nn.LayerNorm(width), recompute

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = whole_block(block)(x) if self.recompute else block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


class VisionTransformer(nn.Module):
    """Of images in patches, with a class token.

    Args:
        packed: Attention is ``nn.MultiheadAttention``, as torchvision has it.
    """

    def __init__(
        self, side: int, patch: int, width: int, layers: int, heads: int, hidden: int, classes: int, *,
        packed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(PreNormBlock(width, heads, hidden, packed=packed) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class _Mixing(nn.Module):
    """An MLP over patches, then one over channels."""

    def __init__(self, patches: int, width: int, over_patches: int, over_channels: int) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.patches_up, self.patches_down = nn.Linear(patches, over_patches), nn.Linear(over_patches, patches)
        self.up, self.down = nn.Linear(width, over_channels), nn.Linear(over_channels, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        across = self.norm(x).transpose(1, 2)
        x = x + self.patches_down(functional.gelu(self.patches_up(across))).transpose(1, 2)
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class VisionMixer(nn.Module):
    """MLP-Mixer."""

    def __init__(
        self, side: int, patch: int, width: int, layers: int, over_patches: int, over_channels: int, classes: int
    ) -> None:
        super().__init__()
        self.patches, count = nn.Conv2d(3, width, patch, patch), (side // patch) ** 2
        self.blocks = nn.ModuleList(_Mixing(count, width, over_patches, over_channels) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class _KeepsACopy(torch.autograd.Function):
    """``x``, of which a copy is saved for backward that nobody reads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.clone())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class PreNormBlock(nn.Module):
    """Attention and an MLP with GELU, each after a LayerNorm.

    ``packed`` in half precision saves one tensor more, as ``nn.MultiheadAttention`` did up to PyTorch 2.2.
    """

    def __init__(self, width: int, heads: int, hidden: int, *, causal: bool = False, packed: bool = False) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.packed = nn.MultiheadAttention(width, heads, batch_first=True) if packed else None
        if not packed:
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        if self.packed is not None:
            normed = self.norm(x)
            y = self.packed(normed, normed, normed, need_weights=False)[0]
            x = (_KeepsACopy.apply(y) if x.dtype != torch.float32 else y) + x
            return x + self.down(functional.gelu(self.up(self.norm_2(x))))
        q, k, v = self.qkv(self.norm(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))
