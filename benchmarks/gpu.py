"""lowtide against plain and checkpointed training on an accelerator: one JSON line per model and method.

    make gpu                                    on the accelerator of this machine, under eight minutes
    python benchmarks/gpu.py --device standin   the same code on the tests' stand-in for one; needs g++, says no speeds
    .venv-cuda/bin/python benchmarks/gpu.py     CUDA's build of PyTorch on the CUDA stand-in, likewise

A line of a stand-in says so (``standin``), and goes to no results file unless ``--out`` names one. No table shows its
times.

Two models, weights drawn at random, nothing downloaded: a decoder in plain PyTorch, and a Llama of transformers. Every
method trains from the same weights on the same batch for a few steps, twice. First with deterministic kernels, since
the backward of attention adds in any order on a GPU: losses and weights have to have the same bits. Then without: peaks
are the allocator's own. Then forward and backward of all methods are timed in turns, by events. A method that
does not fit, or for which no time was left, is a line that says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from stand_in import is_cuda_stand_in
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "gpu.jsonl"
STAND_IN = "standin"
SEED = 0
STEPS = 3
SOLVE_S = 15.0  # at most for each plan: twelve of them are to leave time for the steps
FRACTIONS = (50, 25)  # percent of the plain step's activations
# By the least memory of the device: layers, width, heads, vocabulary, batch, sequence.
SIZES = {
    "large": (70 << 30, (24, 2048, 16, 32000, 4, 4096)),
    "medium": (20 << 30, (16, 1536, 12, 32000, 4, 2048)),
    "small": (0, (12, 768, 12, 32000, 4, 1024)),
    "tiny": (1 << 62, (3, 64, 4, 128, 2, 64)),  # for the stand-in
}


def main() -> int:
    begin = time.monotonic()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts, else its products are not
    args = _arguments()
    try:
        device = _device(args.device)
    except Exception as error:
        print(error, file=sys.stderr)
        return 2
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it has no deterministic backward: another kernel would run then
    seconds = args.minutes * 60
    sizes = SIZES[args.size or _size_for(device)][1]
    out = args.out or (None if is_stand_in(device) else RESULTS)
    lines = []
    for share, case in ((0.5, DecoderCase), (1.0, TransformersCase)):  # else the second has what the first leaves
        for line in Measured(case(device, *sizes), args.rounds, begin + share * seconds).lines():
            lines.append(line)
            print(json.dumps(line), flush=True)
            if out is not None:
                out.write_text("".join(json.dumps(x) + "\n" for x in lines))
    if out is not None:
        print(f"written to {out}. Please open an issue with this file.", file=sys.stderr)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="such as xpu, or standin (default: the accelerator that torch finds)")
    parser.add_argument("--size", choices=SIZES, help="of the models (default: by the device's memory)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of every method (default 5)")
    parser.add_argument("--minutes", type=float, default=7.0, help="begin nothing more after this long (default 7)")
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.relative_to(HERE.parent)}; none for the stand-in")
    return parser.parse_args()


def _device(asked: str | None) -> torch.device:
    """Raises: DeviceError: it is not here; LowtideError: there is none at all."""
    from lowtide.device.names import accelerator_type, check_is_here
    from lowtide.errors import LowtideError

    if asked is not None and asked.partition(":")[0] == STAND_IN:
        sys.path.insert(0, str(HERE.parent / "tests"))
        import accelerator.device

        accelerator.device.poison(False).__enter__()  # until the process ends: time
        torch.set_num_threads(1)
    elif asked is None and not accelerator_type():
        raise LowtideError(
            "there is no accelerator here that torch finds. For the same code on the tests' stand-in for one: "
            f"--device {STAND_IN}."
        )
    check_is_here(asked or accelerator_type())
    device = torch.device(asked or accelerator_type())
    if device.type == "cpu":
        raise LowtideError("this benchmark is for accelerators. On a CPU: make bench.")
    device = torch.device(device.type, device.index or 0)
    torch.accelerator.set_device_index(device.index)  # what is made without a device is made there
    return device


def is_stand_in(device: torch.device) -> bool:
    """Whether ``device`` is no GPU: no time of it says anything."""
    return device.type == STAND_IN or (device.type == "cuda" and is_cuda_stand_in())


def _size_for(device: torch.device) -> str:
    if is_stand_in(device):
        return "tiny"
    _, capacity = torch.accelerator.get_memory_info(device)
    return next(name for name, (least, _) in SIZES.items() if capacity >= least)


# ---- what is trained


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 6 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    checkpointed = False

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@dataclass
class Case:
    """A model on its device, with a batch."""

    device: torch.device
    layers: int
    width: int
    heads: int
    vocabulary: int
    batch_size: int
    length: int
    model: Any = None
    ids: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        torch.manual_seed(SEED)
        dtype = torch.float32 if is_stand_in(self.device) else torch.bfloat16
        with self.device:
            self.model = self.built().to(dtype).train()
            self.ids = torch.randint(0, self.vocabulary, (self.batch_size, self.length))

    def built(self) -> nn.Module:
        raise NotImplementedError

    @staticmethod
    def loss(model: Any, ids: Any) -> torch.Tensor:
        raise NotImplementedError

    def checkpointing(self) -> AbstractContextManager[Any]:
        raise NotImplementedError


class DecoderCase(Case):
    name = "decoder"

    def built(self) -> nn.Module:
        return Decoder(self.layers, self.width, self.heads, self.vocabulary)

    @staticmethod
    def loss(model: Any, ids: Any) -> torch.Tensor:
        return model(ids)

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        self.model.checkpointed = True
        try:
            yield
        finally:
            self.model.checkpointed = False


class TransformersCase(Case):
    name = "transformers llama"

    def built(self) -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        config = transformers.LlamaConfig(
            hidden_size=self.width, intermediate_size=3 * self.width, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.heads // 4, vocab_size=self.vocabulary,
            max_position_embeddings=self.length, use_cache=False, attn_implementation="sdpa",
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)

    @staticmethod
    def loss(model: Any, ids: Any) -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        switch = "activation" if hasattr(self.model, "activation_checkpointing_enable") else "gradient"  # up to 5.17
        getattr(self.model, f"{switch}_checkpointing_enable")()
        try:
            yield
        finally:
            getattr(self.model, f"{switch}_checkpointing_disable")()
            self.model.disable_input_require_grads()  # its own switch leaves these hooks on


# ---- what is measured


@dataclass(frozen=True)
class Method:
    """A way to run the step: ``around`` is entered for each step; ``plan`` if it is one of lowtide's."""

    name: str
    around: Callable[[], AbstractContextManager[Any]]
    plan: Any = None


class Measured:
    """One case: its methods and what they took."""

    def __init__(self, case: Any, rounds: int, deadline: float) -> None:
        self.case, self.rounds, self.deadline = case, rounds, deadline
        self.step_s: dict[str, float] = {}  # of one step of each method, roughly
        self.start = [p.detach().cpu().clone() for p in case.model.parameters()]
        self.reference: tuple[list[float], list[int]] | None = None
        for parameter in case.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def lines(self) -> Iterator[dict]:
        """One line per method, in order of measurement."""
        import lowtide
        from lowtide.measurement.timing import compare_times

        methods = [Method("plain", nullcontext), Method("torch checkpoint, every layer", self.case.checkpointing)]
        measured = {method.name: self._trained(method) for method in methods}
        graph = lowtide.trace(self.case.model, self.case.ids, step=self.case.loss)
        try:
            costs = lowtide.measure(graph, tiers=("host",), refresh=True)
        except lowtide.LowtideError:  # a device without pinned memory; the method that needs it will say so
            costs = lowtide.measure(graph, refresh=True)
        plain = lowtide.simulate(graph, costs, {})
        measured["plain"] |= {
            "predicted_peak_bytes": plain.counted_peak_bytes or plain.peak_bytes,
            "predicted_reserved_bytes": plain.reserved_peak_bytes,
        }
        for name, budget, options in self._budgets(measured, plain):
            method, line = self._planned(f"lowtide, {name}", partial(lowtide.solve, graph, costs, budget, **options))
            measured[line["method"]] = line
            methods += [method] if method is not None else []
        calls = {m.name: partial(self._step, m) for m in methods if measured[m.name]["status"] == "ok"}
        rounds = self._rounds(calls)
        times = compare_times(calls, rounds=rounds, device=self.case.device, seed=SEED) if calls else {}
        for name, line in measured.items():
            if name in times:
                line |= {"time_ms": times[name].median_ms, "time_ms_quartiles": times[name].quartiles, "rounds": rounds}
            if name in times and "plain" in times:
                line["overhead"] = times[name].median_ms / times["plain"].median_ms - 1
            yield self._shared(graph) | line

    def _budgets(self, measured: dict[str, dict], plain: Any) -> Iterator[tuple[str, int | str, dict]]:
        for percent in FRACTIONS:
            yield f"{percent} %", f"{percent}%", {}
        full = measured["torch checkpoint, every layer"]
        if full["status"] == "ok":
            yield "at the peak of every layer", full["peak_bytes"], {}
        yield f"{FRACTIONS[-1]} % with host memory", f"{FRACTIONS[-1]}%", {"offload": ("host",)}
        if plain.reserved_peak_bytes is not None:
            above = plain.reserved_peak_bytes - plain.peak_bytes
            budget = (plain.peak_bytes + plain.live_bytes[0]) // 2 + above
            yield "half, of reserved memory", budget, {"budget_kind": "reserved"}

    def _left_s(self) -> float:
        return self.deadline - time.monotonic()

    def _rounds(self, calls: dict[str, Any]) -> int:
        """As many as the time is enough for, a round to warm up besides; 1 at least."""
        round_s = sum(self.step_s[name] for name in calls)
        return max(1, min(self.rounds, int(self._left_s() / max(round_s, 1e-9)) - 1))

    def _planned(self, name: str, solve: Callable[..., Any]) -> tuple[Method | None, dict]:
        import lowtide
        from lowtide.tape.attach import applied
        from lowtide.tape.offload.open_tiers import open_tiers

        if self._left_s() < 0:
            return None, {"method": name, "status": "out of time"}
        try:
            plan = solve(time_limit_s=max(1.0, min(SOLVE_S, self._left_s() / 2)))
            # As around a whole training: what is pinned or opened stays.
            tiers = open_tiers(plan, lowtide.Offload())
        except lowtide.BudgetInfeasibleError as error:
            return None, {"method": name, "status": "infeasible", "least_bytes": error.least_bytes}
        except (lowtide.LowtideError, ValueError) as error:
            return None, {"method": name, "status": "refused", "reason": str(error).splitlines()[0]}
        method = Method(name, partial(applied, self.case.model, plan, tiers), plan)
        return method, self._trained(method) | {
            "budget_bytes": plan.budget_bytes,
            "budget_kind": plan.budget_kind,
            "predicted_peak_bytes": plan.measurable_peak_bytes,
            "predicted_reserved_bytes": plan.predicted_reserved_peak_bytes,
            "predicted_overhead": plan.predicted_overhead,
            "counts": plan.counts,
            "bytes_by_action": plan.bytes_by_action,
            "solve_s": plan.solve_s,
        }

    def _trained(self, method: Method) -> dict:
        """A few steps from the first weights: peaks, and whether losses and weights have the first method's bits."""
        from lowtide.device.out_of_memory import is_out_of_memory

        print(f"{self.case.name}: {method.name}", file=sys.stderr, flush=True)
        if self._left_s() < 0:
            return {"method": method.name, "status": "out of time"}
        index = self.case.device.index
        try:
            with _deterministic():
                losses = self._steps(method)
            weights = [_bits(p) for p in self.case.model.parameters()]
            gc.collect()
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(index)
            self._steps(method)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return {"method": method.name, "status": "out of memory", "reason": str(error).splitlines()[0]}
        peak_bytes = torch.accelerator.max_memory_allocated(index)
        reserved_bytes = torch.accelerator.max_memory_reserved(index)
        if self.reference is None:
            self.reference = losses, weights
        return {
            "method": method.name,
            "status": "ok",
            "losses": losses,
            "losses_equal": losses == self.reference[0],
            "weights_equal": weights == self.reference[1],
            "peak_bytes": peak_bytes,
            "reserved_bytes": reserved_bytes,
        }

    def _steps(self, method: Method) -> list[float]:
        """A few steps from the first weights. Returns: their losses."""
        parameters = list(self.case.model.parameters())
        with torch.no_grad():
            for parameter, first in zip(parameters, self.start, strict=True):
                parameter.copy_(first)
                parameter.grad.zero_()
        torch.manual_seed(SEED)
        losses = []
        for _ in range(STEPS):
            began = time.monotonic()
            losses.append(self._step(method))  # reads the loss, and so waits for the device
            self.step_s[method.name] = time.monotonic() - began
            with torch.no_grad():
                for parameter in parameters:
                    parameter.sub_(parameter.grad, alpha=0.01)
                    parameter.grad.zero_()
        return losses

    def _step(self, method: Method) -> float:
        with method.around():
            loss = self.case.loss(self.case.model, self.case.ids)
        loss.backward()
        return loss.item()

    def _shared(self, graph: Any) -> dict:
        from lowtide.device.names import device_name

        case = self.case
        return {
            "benchmark": "gpu",
            "case": case.name,
            "layers": case.layers,
            "width": case.width,
            "vocabulary": case.vocabulary,
            "batch": case.batch_size,
            "sequence": case.length,
            "dtype": str(next(case.model.parameters()).dtype).removeprefix("torch."),
            "resident_bytes": graph.resident_bytes,
            "seed": SEED,
            **provenance(),
            "device": device_name(case.device),
            "device_type": case.device.type,
            "standin": is_stand_in(case.device),
            "driver": _driver(case.device),
            "runtime": torch.version.cuda or torch.version.hip or getattr(torch.version, "xpu", None),
        }


@contextmanager
def _deterministic() -> Iterator[None]:
    """PyTorch's deterministic kernels, where it has them."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _driver(device: torch.device) -> str | None:
    """The version of the device's driver, where somebody tells."""
    if device.type == "cuda" and shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
        return told[0] if told else None
    properties = getattr(torch.get_device_module(device.type), "get_device_properties", None)
    return None if properties is None else getattr(properties(device), "driver_version", None)


def _bits(tensor: torch.Tensor) -> int:
    """A hash of the tensor's bits, since the weights would not fit twice."""
    whole = tensor.detach().reshape(-1).view(torch.int16)
    weights = torch.arange(1, 4097, device=tensor.device, dtype=torch.int64)
    total = 0
    for part in whole.split(1 << 24):
        padded = F.pad(part, (0, -part.numel() % 4096)).view(-1, 4096)
        total += int((padded.sum(0, dtype=torch.int64) * weights).sum())
    return total


if __name__ == "__main__":
    sys.exit(main())
