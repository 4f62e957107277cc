"""Steps that are not the one that was planned: is the budget kept, what does it cost, and is it told? JSON lines.

    python benchmarks/changing_steps.py                      everything; some five minutes
    python benchmarks/changing_steps.py --only layerdrop     some of it: the other lines of the file stay
    python benchmarks/changing_steps.py --quick              fewer steps, nothing written unless --out says where

Two questions, each case in a process of its own, on one thread:

- ``leaves``: five steps of one kind are planned, then two of another kind come (more layers, a larger batch, sizes that
  depend on data, grown parameters): their peaks beside the budget, and the lines that were said of them. Twice, within
  two budgets: a tenth more than what checkpointing each layer takes in that other step (``tight``), and at least a
  fiftieth more than the first kind takes plain, so that its plan keeps everything (``roomy``). With ``before`` another
  step of that kind has come earlier, and five more of the first since.
- ``changes``: steps that differ from one to the next (dropped layers, recycling, graphs, images of many sizes). Peaks
  of each, and processor time beside the plain steps', which take turns with ours.

Peaks: the allocator's, of forward and backward, on top of what is resident. Bits: of gradients, against a plain step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from one_process import line_of
from provenance import provenance
from result_lines import replace_lines
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.device import allocation_counter
from lowtide.measurement.allocator import peak_bytes
from lowtide.step.bits import same_bits

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "changing_steps.jsonl"
LIMIT_S = 400
SHARE, MORE = 0.6, 1.1
ROOM = 1.02  # of the plain step's peak, for a plan that keeps everything
PLANNED_STEPS, CHANGING_STEPS, QUICK_STEPS = 5, 24, 6

Step = Callable[[nn.Module, int], torch.Tensor]  # (model, number of the step) -> loss


@dataclass
class Case:
    """One case.

    Attributes:
        make: A model; ``checkpointed``: its layers run under ``torch.utils.checkpoint``.
        step: Forward of step ``i``: of cases that leave a plan, kind ``i`` (0 is the one that is planned).
        change: What comes before step ``i``, such as parameters that grow (``grows``).
        share: The budget, of what the largest step makes. A model whose gradients are much of that needs more.
    """

    name: str
    what: str
    make: Callable[[bool], nn.Module]
    step: Step
    change: Callable[[nn.Module, int], None] = field(default=lambda model, i: None)
    share: float = SHARE
    leaves: bool = False
    grows: bool = False
    kinds: tuple[int, ...] = ()


def _numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _data(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_numbers(seed))


class Layers(nn.Module):
    """Residual layers, of which the first ``count`` run, or those in ``kept``."""

    def __init__(self, checkpointed: bool, *, count: int = 12, width: int = 96) -> None:
        super().__init__()
        self.checkpointed, self.count = checkpointed, count
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(count)
        )

        self.drawn: Iterable[int] = range(count)  # which of them run, where no argument says it

    def forward(self, x: torch.Tensor, kept: list[int] | None = None, passes: int = 1) -> torch.Tensor:
        for _ in range(passes):
            for i in self.drawn if kept is None else kept:
                layer = self.layers[i]
                x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return x


class Points(nn.Module):
    """Attention of queries over points, whose number grows, as in Gaussian splatting."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.points = nn.Parameter(torch.rand(400, 2))
        ins = [2, 64, 64, 64]
        self.features = nn.Sequential(*(part for n in ins for part in (nn.Linear(n, 64), nn.GELU())))

    def forward(self, queries: torch.Tensor) -> torch.Tensor:
        values = (
            checkpoint(self.features, self.points, use_reentrant=False)
            if self.checkpointed
            else self.features(self.points)
        )
        return torch.softmax(queries @ self.points.T, -1) @ values


class Messages(nn.Module):
    """A network on graphs, each of another size."""

    def __init__(self, checkpointed: bool, width: int = 48, count: int = 6) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.first = nn.Linear(8, width)
        self.message, self.update = (nn.ModuleList(nn.Linear(2 * width, width) for _ in range(count)) for _ in range(2))

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for message, update in zip(self.message, self.update):

            def layer(x: torch.Tensor, message: nn.Module = message, update: nn.Module = update) -> torch.Tensor:
                sent = torch.relu(message(torch.cat([x[source], x[target]], -1)))
                received = torch.zeros_like(x).index_add(0, target, sent)
                return x + torch.tanh(update(torch.cat([x, received], -1)))

            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


class Images(nn.Module):
    """Convolutions on a list of images, as in detection."""

    def __init__(self, checkpointed: bool, channels: int = 16) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        ins = [3, *[channels] * 5]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(n, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.GELU()) for n in ins
        )

    def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
        found = []
        for image in images:
            x = image[None]
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            found.append(x.mean((0, 2, 3)))
        return torch.stack(found)


def _grow(model: nn.Module, times: int) -> None:
    points = model.points
    points.data = torch.cat([points.data] * times)
    points.grad = None


def _graph(model: nn.Module, i: int) -> torch.Tensor:
    numbers = _numbers(i)
    n = int(600 + 2000 * torch.rand(1, generator=numbers).item())
    source, target = (torch.randint(n, (4 * n,), generator=numbers) for _ in range(2))
    return model(_data(i, n, 8), source, target).square().mean()


def _images(model: nn.Module, i: int) -> torch.Tensor:
    numbers = _numbers(i)
    sides = torch.randint(24, 80, (4, 2), generator=numbers).tolist()
    return model([_data(10 * i + k, 3, *side) for k, side in enumerate(sides)]).square().mean()


def _dropped(model: nn.Module, i: int) -> torch.Tensor:
    kept = torch.nonzero(torch.rand(model.count, generator=_numbers(i)) > 0.25).flatten().tolist()
    return model(_data(i, 512, 96), kept or [0]).square().mean()


def _rarely_dropped(model: nn.Module, i: int) -> torch.Tensor:
    model.drawn = (torch.rand(model.count, generator=_numbers(i)) > 0.08).nonzero().flatten().tolist()
    return model(_data(i, 512, 96)).square().mean()


def _recycled(model: nn.Module, i: int) -> torch.Tensor:
    return model(_data(i, 512, 96), passes=1 + i % 4).square().mean()


def _speech(checkpointed: bool, width: int = 64) -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=32, hidden_size=width, num_hidden_layers=4, num_attention_heads=4, intermediate_size=4 * width,
        conv_dim=(width // 2,) * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, layerdrop=0.2,
        mask_time_prob=0.2, attn_implementation="eager",
    )  # fmt: skip
    model = Wav2Vec2ForCTC(config)
    if checkpointed:
        model.gradient_checkpointing_enable()
    return model.train()


def _spoken(model: nn.Module, i: int, rows: int = 2) -> torch.Tensor:
    import numpy

    numpy.random.seed(i)  # its masks and dropped layers
    length = 8000 + 1600 * (i % 5)
    labels = torch.randint(1, 32, (rows, 8), generator=_numbers(i))
    return model(_data(i, rows, length), labels=labels).loss


def _more_layers(model: nn.Module, i: int) -> torch.Tensor:
    return model(_data(i, 512, 96), list(range(6 + i))).square().mean()


def _more_rows(model: nn.Module, i: int) -> torch.Tensor:
    return model(_data(i, 512 + 256 * i, 96)).square().mean()


class Rows:
    """A batch whose sizes no signature shows."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class LayersOfRows(Layers):
    def forward(self, rows: Rows) -> torch.Tensor:
        return super().forward(rows.x)


def _hidden_rows(model: nn.Module, i: int) -> torch.Tensor:
    return model(Rows(_data(i, 512 + 256 * i, 96))).square().mean()


class LayersOfChosen(Layers):
    """Rows with a positive first number: how many that is, the data say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[x[:, 0] > 0])


def _chosen(model: nn.Module, i: int) -> torch.Tensor:
    x = _data(i, 1536, 96)
    x[:, 0] = -1.0
    x[: 512 + 256 * i, 0] = 1.0
    return model(x).square().mean()


def _queries(model: nn.Module, i: int) -> torch.Tensor:
    return model(_data(i, 64, 2)).square().mean()


CASES = [
    Case("parameters_grow", "parameters grow to 2, 4, 8 times", Points, _queries,
         lambda model, kind: _grow(model, 2) if kind else None, leaves=True, grows=True, kinds=(1, 2, 3)),
    Case("more_layers", "1, 2, 3 layers more", Layers, _more_layers, leaves=True, kinds=(1, 2, 3)),
    Case("more_rows", "a batch of 1.5, 2, 2.5 times", Layers, _more_rows, leaves=True, kinds=(1, 2, 3)),
    Case("hidden_rows", "the same, in an object", LayersOfRows, _hidden_rows, leaves=True, kinds=(1, 2, 3)),
    Case("chosen_rows", "the same, chosen by the data", LayersOfChosen, _chosen, leaves=True, kinds=(1, 2, 3)),
    Case("layerdrop", "a quarter of the layers is left out", Layers, _dropped),
    Case("layerdrop_inside", "a layer is left out now and then, drawn inside", lambda c: Layers(c, count=8),
         _rarely_dropped),
    Case("recycling", "one to four passes", lambda c: Layers(c, count=4), _recycled),
    Case("graphs", "graphs of 600 to 2,600 nodes", Messages, _graph),
    Case("images", "lists of four images of 24 to 80 pixels", Images, _images),
    Case("wav2vec2", "wav2vec2, 64 wide: dropped layers, masks, five lengths", _speech, _spoken),
    Case("wav2vec2_256", "wav2vec2, 256 wide, at 70 %: the same", lambda c: _speech(c, 256),
         lambda model, i: _spoken(model, i, 8), share=0.7),
]  # fmt: skip


def _resident_bytes(model: nn.Module) -> int:
    held = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return sum(t.nbytes for t in held)


def _run(model: nn.Module, case: Case, i: int) -> None:
    torch.manual_seed(i)
    case.step(model, i).backward()


def _peak(model: nn.Module, case: Case, i: int) -> int:
    """Of forward and backward of step ``i``, resident memory included; no gradient is there before."""
    model.zero_grad()
    there = _resident_bytes(model)
    return there + peak_bytes(lambda: _run(model, case, i))


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _alike(case: Case, *, checkpointed: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return case.make(checkpointed)


def leaves(case: Case, steps: int) -> dict[str, Any]:
    """A step of each other kind, each after ``steps`` of the first one under a plan for it."""
    return {
        "steps": [
            _left(case, kind, steps, roomy=roomy, before=before)
            for roomy in (False, True)
            for before in ((False, True) if not case.grows else (False,))
            for kind in case.kinds
        ]
    }


def _left(case: Case, kind: int, steps: int, *, roomy: bool, before: bool) -> dict[str, Any]:
    plain, ours, checkpointed = (_alike(case, checkpointed=c) for c in (False, False, True))
    first, least_first = _peak(plain, case, 0), _peak(checkpointed, case, 0)
    for model in (plain, checkpointed):
        for _ in range(kind):
            case.change(model, kind)
    least = _peak(checkpointed, case, kind)
    budget = int(MORE * max(least, least_first))
    if roomy:
        budget = max(budget, int(ROOM * first))
    with lowtide.fit(ours, budget=budget) as fit:

        def planned() -> None:
            for _ in range(steps):
                _peak(ours, case, 0)
                fit.wait(60)

        planned()
        if before:
            _peak(ours, case, kind)
            planned()
        said, planned_steps = set(fit.status().reasons), fit.status().planned_steps
        in_force = fit.status().in_force
        for _ in range(kind):
            case.change(ours, kind)
        peaks = [_peak(ours, case, kind) for _ in range(2)]
        told = sorted(set(fit.status().reasons) - said)
    plain_peak = _peak(plain, case, kind)
    return {
        "kind": kind, "roomy": roomy, "before": before, "budget_bytes": budget, "plain_peak_bytes": plain_peak,
        "checkpointed_peak_bytes": least, "peaks": peaks, "planned_before": planned_steps, "in_force": in_force,
        "told": told, "bitwise_equal": all(map(same_bits, _gradients(plain), _gradients(ours))),
    }  # fmt: skip


def changes(case: Case, steps: int) -> dict[str, Any]:
    """Steps that differ, each plain, checkpointed and under a budget of a share of what the largest makes."""
    plain, ours, checkpointed = (_alike(case, checkpointed=c) for c in (False, False, True))
    there = _resident_bytes(plain)
    plain_peaks = [_peak(plain, case, i) for i in range(steps)]
    budget = there + int(case.share * (max(plain_peaks) - there))
    checkpointed_peaks = [_peak(checkpointed, case, i) for i in range(steps)]
    with lowtide.fit(ours, budget=budget) as fit:
        peaks, equal = [], True
        for i in range(steps):
            peaks.append(_peak(ours, case, i))
            plain.zero_grad()
            _run(plain, case, i)
            equal &= all(map(same_bits, _gradients(plain), _gradients(ours)))
        fit.wait(60)
        learned = fit.status()
        seconds: dict[str, list[float]] = {"plain": [], "checkpointed": [], "lowtide": []}
        for i in range(steps, 2 * steps):
            for name, model in (("plain", plain), ("checkpointed", checkpointed), ("lowtide", ours)):
                model.zero_grad()
                began = time.process_time()
                _run(model, case, i)
                seconds[name].append(time.process_time() - began)
        status = fit.status()
    later = status.steps - learned.steps
    return {
        "budget_bytes": budget, "plain_peak_bytes": max(plain_peaks), "peaks": peaks,
        "checkpointed_peak_bytes": max(checkpointed_peaks), "bitwise_equal": equal,
        "planned_share": (status.planned_steps - learned.planned_steps) / later if later else 0.0,
        "step_ms": {name: 1e3 * statistics.median(found) for name, found in seconds.items()},
        "all_ms": {name: 1e3 * sum(found) for name, found in seconds.items()},
        "reasons": list(status.reasons),
    }  # fmt: skip


def line(case: Case, steps: int) -> dict[str, Any]:
    found = leaves(case, PLANNED_STEPS) if case.leaves else changes(case, steps)
    about = {"benchmark": "changing_steps", "case": case.name, "what": case.what, "leaves": case.leaves}
    return about | {"status": "ok"} | found | provenance()


def told(found: dict[str, Any]) -> str:
    name = f"{found['case']:<16}"
    if found["status"] != "ok":
        return "\n".join([f"{name} {found['status']}", *found["error"]])
    if found["leaves"]:
        parts: dict[str, list[str]] = {}
        for row in found["steps"]:
            which = ("roomy" if row["roomy"] else "tight") + (", before" if row["before"] else "")
            bits = "" if row["bitwise_equal"] else " OTHER BITS"
            shown = f"{max(row['peaks']) / row['budget_bytes']:.2f}" + (" told" if row["told"] else "") + bits
            parts.setdefault(which, []).append(shown)
        return "\n".join(f"{name} {which:<14} of the budget {', '.join(shown)}" for which, shown in parts.items())
    ms = found["all_ms"]
    return (
        f"{name} of the budget {max(found['peaks']) / found['budget_bytes']:.2f}, "
        f"planned {found['planned_share']:.0%}, "
        f"checkpointed x{ms['checkpointed'] / ms['plain']:.2f}, lowtide x{ms['lowtide'] / ms['plain']:.2f}"
    )


def _in_process(case: Case, *, quick: bool) -> dict[str, Any]:
    found = line_of([__file__, "--here", "--only", case.name, *(["--quick"] if quick else [])], LIMIT_S)
    about = {"benchmark": "changing_steps", "case": case.name, "what": case.what, "leaves": case.leaves}
    return found if found["status"] == "ok" else about | found | provenance()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], metavar="CASE")
    parser.add_argument("--out", type=Path, help=f"default {RESULTS.relative_to(HERE.parent)}; with --quick stdout")
    parser.add_argument("--quick", action="store_true", help="fewer steps, to see that it runs")
    parser.add_argument("--here", action="store_true", help="one case, in this process, its line to stdout")
    args = parser.parse_args()
    chosen = [case for case in CASES if args.only is None or case.name in args.only]
    if args.here:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore")
        allocation_counter.prepare(waits=True)  # else the first case's steps are measured by a profiler
        print(json.dumps(line(chosen[0], QUICK_STEPS if args.quick else CHANGING_STEPS)), flush=True)
        return 0
    lines = []
    for case in chosen:
        lines.append(_in_process(case, quick=args.quick))
        print(told(lines[-1]), file=sys.stderr, flush=True)
    out = args.out or (None if args.quick else RESULTS)
    if out is None:
        print("".join(json.dumps(found) + "\n" for found in lines), end="")
    else:
        replace_lines(out, lines, by="case", order=[case.name for case in CASES])
    return 1 if any(found["status"] != "ok" for found in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
