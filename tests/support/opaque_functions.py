"""A Llama whose norms, rotary embeddings, SwiGLUs, attention and loss are autograd Functions over raw memory.

No dispatcher sees what they compute: their kernels are C, called through ctypes, or NumPy. They stand for the Triton
kernels of Liger and others, and store what those store.
"""

import ctypes
import math
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.unseen_memory import CopyOfMemory, address_of, is_within_reach, memory_of
from torch import nn
from torch.autograd import Function

_SOURCE = r"""
#include <cmath>
extern "C" {
void norm(const float* x, const float* w, float* y, float* r, long rows, long n, float eps) {
  for (long i = 0; i < rows; i++) {
    const float* a = x + i * n; float s = 0;
    for (long j = 0; j < n; j++) s += a[j] * a[j];
    float q = 1.0f / std::sqrt(s / n + eps); r[i] = q;
    for (long j = 0; j < n; j++) y[i * n + j] = a[j] * q * w[j];
  }
}
void norm_backward(const float* g, const float* x, const float* w, const float* r, float* gx, float* gw, long rows,
                   long n) {
  for (long i = 0; i < rows; i++) {
    const float *a = x + i * n, *b = g + i * n; float q = r[i], s = 0;
    for (long j = 0; j < n; j++) { s += b[j] * w[j] * a[j]; gw[j] += b[j] * a[j] * q; }
    float c = s * q * q * q / n;
    for (long j = 0; j < n; j++) gx[i * n + j] = b[j] * w[j] * q - a[j] * c;
  }
}
void swiglu(const float* a, const float* b, float* y, long n) {
  for (long i = 0; i < n; i++) y[i] = a[i] / (1.0f + std::exp(-a[i])) * b[i];
}
void swiglu_backward(const float* g, float* a, float* b, long n) {
  for (long i = 0; i < n; i++) {
    float s = 1.0f / (1.0f + std::exp(-a[i])), ga = g[i] * b[i] * s * (1.0f + a[i] * (1.0f - s));
    b[i] = g[i] * a[i] * s; a[i] = ga;
  }
}
void rotate(const float* x, const float* c, const float* s, float* y, long outer, long length, long d, float sign) {
  long h = d / 2;
  for (long o = 0; o < outer; o++) for (long t = 0; t < length; t++) {
    const float *a = x + (o * length + t) * d, *p = c + t * h, *q = s + t * h; float* b = y + (o * length + t) * d;
    for (long j = 0; j < h; j++) {
      b[j] = a[j] * p[j] - sign * a[j + h] * q[j]; b[j + h] = a[j + h] * p[j] + sign * a[j] * q[j];
    }
  }
}
void softmax(float* p, float* lse, long rows, long length, float scale) {
  for (long i = 0; i < rows; i++) {
    float* a = p + i * length; long last = i % length; float m = -INFINITY, s = 0;
    for (long j = 0; j <= last; j++) { a[j] *= scale; m = a[j] > m ? a[j] : m; }
    for (long j = 0; j <= last; j++) { a[j] = std::exp(a[j] - m); s += a[j]; }
    for (long j = 0; j <= last; j++) a[j] /= s;
    for (long j = last + 1; j < length; j++) a[j] = 0;
    lse[i] = m + std::log(s);
  }
}
void loss(const float* x, const long* target, float* lse, float* out, long rows, long n) {
  float total = 0;
  for (long i = 0; i < rows; i++) {
    const float* a = x + i * n; float m = -INFINITY, s = 0;
    for (long j = 0; j < n; j++) m = a[j] > m ? a[j] : m;
    for (long j = 0; j < n; j++) s += std::exp(a[j] - m);
    lse[i] = m + std::log(s); total += lse[i] - a[target[i]];
  }
  out[0] = total / rows;
}
void loss_backward(const float* x, const long* target, const float* lse, float* gx, long rows, long n, float g) {
  for (long i = 0; i < rows; i++) {
    for (long j = 0; j < n; j++) gx[i * n + j] = std::exp(x[i * n + j] - lse[i]) * g / rows;
    gx[i * n + target[i]] -= g / rows;
  }
}
}
"""


@cache
def _kernels() -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(prefix="opaque_kernels_"))
    (folder / "kernels.cpp").write_text(_SOURCE)
    library = folder / "kernels.so"
    # Not -ffast-math: a library linked with it turns denormal numbers into zeros in the whole process.
    fast = ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]
    flags = ["-O3", "-march=native", *fast, "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, "-o", library, folder / "kernels.cpp"], check=True)
    return ctypes.CDLL(str(library))


def launch(kernel: str, *args: Any) -> None:
    """Run a kernel on the memory of tensors, as no dispatcher sees it."""

    copies: list[CopyOfMemory] = []

    def given(a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            assert a.is_contiguous()
            if is_within_reach(a):
                return ctypes.c_void_p(address_of(a))
            copies.append(CopyOfMemory(a.device, a.data_ptr(), a.nbytes))
            return copies[-1].bytes
        return ctypes.c_float(a) if isinstance(a, float) else ctypes.c_long(a)

    getattr(_kernels(), kernel)(*map(given, args))
    for copy in copies:
        copy.put_back()


class RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        y, r = torch.empty_like(x), torch.empty(x.shape[:-1])
        launch("norm", x, weight, y, r, r.numel(), x.shape[-1], eps)
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, weight, r = ctx.saved_tensors
        gx, gw = torch.empty_like(x), torch.zeros_like(weight)
        launch("norm_backward", g.contiguous(), x, weight, r, gx, gw, r.numel(), x.shape[-1])
        return gx, gw, None


class SwiGLU(Function):
    """Its backward writes both gradients over what it stored, as Liger's does."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(a)
        launch("swiglu", a, b, y, a.numel())
        ctx.save_for_backward(a, b)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        launch("swiglu_backward", g.contiguous(), a, b, a.numel())
        return a, b


class Rotary(Function):
    """Of queries and keys at once: two outputs. In the form with ``setup_context``."""

    @staticmethod
    def forward(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return _rotated(q, cos, sin, 1.0), _rotated(k, cos, sin, 1.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[2], inputs[3])

    @staticmethod
    def backward(ctx: Any, gq: torch.Tensor, gk: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotated(gq, cos, sin, -1.0), _rotated(gk, cos, sin, -1.0), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    launch("rotate", x, cos, sin, y, x.shape[0] * x.shape[1], x.shape[2], x.shape[3], sign)
    return y


class Attention(Function):
    """Causal, tiled by head; stores what flash attention stores."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        v = v.contiguous()
        out, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
        length, scale = q.shape[2], 1 / math.sqrt(q.shape[3])
        for q_, k_, v_, o_, l_ in _by_head(q, k, v, out, lse):
            p, sums = q_ @ k_.T, np.empty(length, np.float32)
            pointers = (ctypes.c_void_p(a.ctypes.data) for a in (p, sums))
            _kernels().softmax(*pointers, ctypes.c_long(length), ctypes.c_long(length), ctypes.c_float(scale))
            l_[...] = sums
            o_[...] = p @ v_
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        g = g.contiguous()
        gq, gk, gv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        mask = np.tri(q.shape[2], dtype=np.float32)
        for q_, k_, v_, o_, g_, l_, gq_, gk_, gv_ in _by_head(q, k, v, out, g, lse, gq, gk, gv):
            p = np.exp(np.minimum(q_ @ k_.T * np.float32(ctx.scale) - l_[:, None], 0)) * mask
            gv_[...] = p.T @ g_
            s = p * (g_ @ v_.T - (g_ * o_).sum(-1, keepdims=True)) * np.float32(ctx.scale)
            gq_[...] = s @ k_
            gk_[...] = s.T @ q_
        return gq, gk, gv


def _by_head(*tensors: torch.Tensor) -> Any:
    """The memory of each head, of all tensors together."""
    return zip(*(memory_of(t).reshape(-1, *t.shape[2:]) for t in tensors))


class CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        lse, out = torch.empty(logits.shape[0]), torch.empty(())
        launch("loss", logits, target, lse, out, *logits.shape)
        ctx.save_for_backward(logits, target, lse)
        return out

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        logits, target, lse = ctx.saved_tensors
        made = torch.empty_like(logits)
        launch("loss_backward", logits, target, lse, made, *logits.shape, float(g))
        return made, None


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RMSNorm.apply(x, self.weight, 1e-6)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        hidden = 8 * width // 3 // 16 * 16
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = Rotary.apply(q, k, cos, sin)
        x = x + self.o(Attention.apply(q, k, v).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(SwiGLU.apply(self.gate(h), self.up(h)))


class OpaqueLlama(nn.Module):
    """``every``: that one of so many layers is a checkpoint; 0: none."""

    def __init__(
        self, *, layers: int = 2, width: int = 32, heads: int = 2, words: int = 64, length: int = 16, every: int = 0
    ) -> None:
        super().__init__()
        self.every = every
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = Norm(width), nn.Linear(width, words, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(length), 1e4 ** -(torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for i, layer in enumerate(self.layers):
            if self.every and i % self.every == 0:
                x = torch.utils.checkpoint.checkpoint(layer, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return CrossEntropy.apply(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
