"""Kinds of training steps: is the predicted peak what the step takes, and is the budget kept? One JSON line a kind.

    python benchmarks/true_steps.py                       all kinds; about ten minutes
    python benchmarks/true_steps.py --kinds maml adamw    some of them: the other lines of the file stay
    python benchmarks/true_steps.py --quick               fewer steps, nothing written unless --out says where
    python benchmarks/true_steps.py --device cuda         peaks and bits of a GPU, or of the CUDA stand-in; no times

Each kind is a process of its own, on one thread. There the same training runs plain, under ``torch.utils.checkpoint``
around each block where that works, and under ``lowtide.fit(model, budget=...)`` without a batch, with the peak that
checkpointing takes as its budget. Where checkpointing does not work, or takes more than 90 % of the plain peak, the
budget is what is resident and 60 % of the rest of the plain peak.

- Peaks: the allocator's, of each step, on top of what is resident before it (weights, gradients, optimizer states, the
  batch). The predicted one is that of the plan that the step ran under. On CUDA: what ``torch.cuda.
  max_memory_allocated()`` says after each step. There each training has a process of its own: autograd orders nodes by
  numbers that each thread counts for itself, so what ran before changes the order of second derivatives, and the peak.
- Times: processor time, steps of the trainings in turn, medians. Where a step ends with the next one's call, lowtide
  would see the plain steps in between: there the trainings are timed one after the other.
- Bits: losses of each step and the weights after all of them, against the plain training's.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import pickle
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from one_process import line_of
from provenance import provenance
from result_lines import replace_lines
from stand_in import is_cuda_stand_in
from step_probe import resident_bytes
from true_step_kinds import KINDS, Kind, Training

import lowtide
from lowtide.measurement.allocator import measuring, seen_on_cpu
from lowtide.step.bits import same_bits
from lowtide.step.operators import allocated_bytes, storage_of, tensors_in

HERE = Path(__file__).parent
RESULTS = HERE / "results"
FRACTION = 0.6
MOST_OF_PLAIN = 0.9  # where checkpointing takes more, it is no budget
STEPS, PLANNED_AFTER, ROUNDS = 10, 4, 7
PARTS = ("planned", "unplanned")
LIMIT_S = 300  # of one kind


def main() -> int:
    args = _arguments()
    chosen = [kind for kind in KINDS if args.kinds is None or kind.name in args.kinds]
    if args.here:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", message=".*create_graph=True.*")
        rounds = 2 if args.quick else ROUNDS
        print(json.dumps(line_on_cuda(chosen[0]) if args.device == "cuda" else line(chosen[0], rounds=rounds)))
        return 0
    lines = []
    for kind in chosen:
        lines.append(_in_process(kind, args.device, quick=args.quick))
        print(told(lines[-1]), file=sys.stderr, flush=True)
    if args.out is None:
        print("".join(json.dumps(found) + "\n" for found in lines), end="")
    else:
        _write(args.out, lines)
    return 1 if any(found["status"] != "ok" for found in lines) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kinds", nargs="+", choices=[kind.name for kind in KINDS], metavar="KIND", help="some of them"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the steps run")
    parser.add_argument("--out", type=Path, help="default results/true_steps_DEVICE.jsonl; with --quick stdout")
    parser.add_argument("--quick", action="store_true", help="fewer steps, to see that it runs")
    parser.add_argument("--here", action="store_true", help="one kind, in this process, its line to stdout")
    args = parser.parse_args()
    if args.out is None and not args.quick:
        args.out = RESULTS / f"true_steps_{args.device}.jsonl"
    return args


def _write(out: Path, lines: list[dict]) -> None:
    replace_lines(out, lines, by="kind", order=[kind.name for kind in KINDS])


def _in_process(kind: Kind, device: str, *, quick: bool) -> dict:
    arguments = [__file__, "--here", "--kinds", kind.name, "--device", device, *(["--quick"] if quick else [])]
    found = line_of(arguments, LIMIT_S)
    about = {"benchmark": f"true_steps_{device}", "kind": kind.name, "what": kind.what}
    return found if found["status"] == "ok" else about | found | provenance()


# -- one kind -------------------------------------------------------------------------------------------------------


class Run:
    """A training, step by step, with the peak of each part of a step that it measures."""

    def __init__(self, make: Callable[[bool], Training], *, checkpointed: bool = False) -> None:
        torch.manual_seed(0)
        with seen_on_cpu():  # DDP frees in its second step what it makes here
            self.training = make(checkpointed)
        self.training.measured = self._measured
        self.fit: lowtide.Fit | None = None
        self.losses: list[torch.Tensor] = []
        self.peaks: list[int] = []  # one a measured part
        self.predicted: list[int | None] = []  # of the same parts; None: no plan, or one for larger batches
        self.under_plan: list[bool] = []  # likewise
        self.parts_by_step: list[int] = []
        self.seconds: list[float] = []  # of processor time, of steps whose peak nobody measured
        self.counts_peaks = True
        self.status: lowtide.Status | None = None  # after all steps of a fitted training
        self.left_bytes = 0  # what was resident after the last step
        self._weights: list[torch.Tensor] | None = None
        self._steps = 0

    def step(self) -> None:
        torch.manual_seed(1000 + self._steps)
        gc.collect()  # else garbage that the step frees would count as freed by it
        parts, began = len(self.peaks), time.process_time()
        self.losses += [loss.to("cpu", copy=True) for loss in self.training.step(self._steps)]
        if self.counts_peaks:
            self.parts_by_step.append(len(self.peaks) - parts)
        else:
            self.seconds.append(time.process_time() - began)
        self._steps += 1

    @contextmanager
    def _measured(self) -> Iterator[None]:
        if not self.counts_peaks:
            yield
            return
        planned = self._planned_steps
        if torch.get_default_device().type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            yield
            self.peaks.append(torch.cuda.max_memory_allocated())
        else:
            before = self.resident_bytes()
            with measuring("cpu") as counter:
                yield
            assert counter is not None
            self.peaks.append(before + counter.peak)
        used = self._planned_steps > planned and self.fit is not None
        self.under_plan.append(used)
        self.predicted.append(self._predicted_bytes() if used else None)

    def _predicted_bytes(self) -> int | None:
        """Of the plan that the last step ran under, if that was made for a batch of these sizes."""
        assert self.fit is not None
        plan, sizes = self.fit.plan, str(list(self.training.batch[0].shape)).replace(" ", "")
        return plan.measurable_peak_bytes if sizes in plan.calls[0].replace(" ", "") else None

    def resident_bytes(self) -> int:
        model = self.training.model
        buckets = 0  # DDP's gradients are views of its buckets, which stay when ``zero_grad`` lets go of them
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            buckets = sum(p.nbytes for p in model.parameters() if p.grad is None)
        states = [optimizer.state for optimizer in self.training.optimizers]
        storages = {s._cdata: s for t in tensors_in([list(state.values()) for state in states]) if (s := storage_of(t))}
        batch = [*self.training.batch, *(x.grad for x in self.training.batch if x.is_leaf and x.grad is not None)]
        return buckets + resident_bytes(model, batch) + sum(map(allocated_bytes, storages.values()))

    @property
    def _planned_steps(self) -> int:
        return 0 if self.fit is None else self.fit.status().planned_steps

    def weights(self) -> list[torch.Tensor]:
        return list(self.training.model.state_dict().values()) if self._weights is None else self._weights

    def keep_results(self) -> None:
        """The weights move to the host, the training goes."""
        self.left_bytes = self.resident_bytes()
        shards = [getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in self.weights()]
        self._weights = [shard.detach().cpu() for shard in shards]  # another process knows no mesh
        del self.training, self.fit

    def same_as(self, other: Run) -> bool:
        mine, others = self.weights(), other.weights()
        losses = len(self.losses) == len(other.losses) and all(map(same_bits, self.losses, other.losses))
        return losses and all(map(same_bits, mine, others))


def line(kind: Kind, *, rounds: int) -> dict:
    """Run the kind in this process and measure it."""
    plain = Run(kind.make)
    checkpointed = Run(kind.make, checkpointed=True) if kind.checkpoints else None
    for _ in range(STEPS):
        plain.step()
        if checkpointed is not None:
            checkpointed.step()
    if kind.ends_late:
        before = {"plain": Run(kind.make), "checkpointed": Run(kind.make, checkpointed=True)}
        _timed(before, rounds)
        plain.seconds = before["plain"].seconds
        if checkpointed is not None:
            checkpointed.seconds = before["checkpointed"].seconds
    start = plain.resident_bytes()
    budget = _budget(kind, start, plain, checkpointed)
    ours, watched = Run(kind.make), Run(kind.make)
    _train_fitted(ours, budget)
    plan = ours.fit.plan if ours.fit.plans else None
    equal = plain.same_as(ours)
    if kind.ends_late:
        _timed({"lowtide": ours}, rounds)
        ours.fit.remove()
    watched.fit = lowtide.fit(watched.training.model, budget=budget, optimizer=watched.training.optimizers)
    watched.fit._lifecycle.plans_by_shape.request = lambda *_, **__: None  # nobody plans
    for _ in range(3):
        watched.step()
    runs = {"plain": plain, "checkpointed": checkpointed, "lowtide": ours, "unplanned": watched}
    _timed({name: run for name, run in runs.items() if run is not None and not run.seconds}, rounds)
    for run in (ours, watched):
        run.fit.remove()
    found = {
        "bitwise_equal": equal,
        "checkpointed_equal": None if checkpointed is None else bool(
            all(map(same_bits, plain.losses[: len(checkpointed.losses)], checkpointed.losses[: len(plain.losses)]))),
        "watched_peak_share": max(watched.peaks) / budget,
        "predicted_overhead": None if plan is None else plan.predicted_overhead,
        "step_ms": {name: 1e3 * statistics.median(run.seconds) for name, run in runs.items() if run is not None},
    }  # fmt: skip
    return _found("cpu", kind, start, budget, plain, checkpointed, ours) | found | provenance()


def line_on_cuda(kind: Kind) -> dict:
    """Run each training of the kind on the device, in a process of its own."""

    def steps(run: Run) -> None:
        for _ in range(STEPS):
            run.step()

    plain, start, device = _alone(kind, steps)
    checkpointed = _alone(kind, steps, checkpointed=True)[0] if kind.checkpoints else None
    budget = _budget(kind, start + plain.left_bytes, plain, checkpointed)
    ours, _, _ = _alone(kind, lambda run: _train_fitted(run, budget))
    found = _found("cuda", kind, start + plain.left_bytes, budget, plain, checkpointed, ours)
    return found | {"bitwise_equal": plain.same_as(ours)} | provenance() | {"device": device}


def _alone(kind: Kind, train: Callable[[Run], None], *, checkpointed: bool = False) -> tuple[Run, int, str]:
    """A training in a process of its own; what the device's libraries take there, and the device's name.

    Nothing has run on a device in this process, so a copy of it may begin.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def run_there() -> None:
        torch.set_default_device("cuda")
        torch.zeros(8, 8, requires_grad=True).mm(torch.zeros(8, 8)).sum().backward()  # cuBLAS' workspaces are there now
        start, name = torch.cuda.memory_allocated(), torch.cuda.get_device_name()
        run = Run(kind.make, checkpointed=checkpointed)
        train(run)
        if run.fit is not None:
            run.fit.remove()
        run.keep_results()
        device = f"CUDA's stand-in for an {name}" if is_cuda_stand_in() else name
        sender.send_bytes(pickle.dumps((run, start, device)))

    child = multiprocessing.get_context("fork").Process(target=run_there)
    child.start()
    sender.close()
    try:
        found: tuple[Run, int, str] = pickle.loads(receiver.recv_bytes())
    except EOFError:
        child.join()
        raise RuntimeError(f"the process of {kind.name} ended with {child.exitcode}") from None
    child.join()
    return found


def _budget(kind: Kind, start: int, plain: Run, checkpointed: Run | None) -> int:
    plain_peak = max(plain.peaks)
    if kind.of_plain is not None:
        return int(kind.of_plain * plain_peak)
    if checkpointed is not None and max(checkpointed.peaks) < MOST_OF_PLAIN * plain_peak:
        return max(checkpointed.peaks)
    return start + int(FRACTION * (plain_peak - start))


def _train_fitted(run: Run, budget: int) -> None:
    """All steps; with the optimizers, else nothing is known of their state before the first one."""
    run.fit = lowtide.fit(run.training.model, budget=budget, optimizer=run.training.optimizers)
    for i in range(STEPS):
        run.step()
        if i == PLANNED_AFTER - 1:
            run.fit.wait(120)
    run.status = run.fit.status()


def _found(
    device: str, kind: Kind, start: int, budget: int, plain: Run, checkpointed: Run | None, ours: Run
) -> dict[str, Any]:
    """What the peaks of the fitted training were."""
    planned = [peak for peak, under in zip(ours.peaks, ours.under_plan) if under]
    unplanned = [peak for peak, under in zip(ours.peaks, ours.under_plan) if not under]
    errors = [(peak - of) / of for peak, of in zip(ours.peaks, ours.predicted) if of is not None]
    return {
        "benchmark": f"true_steps_{device}", "kind": kind.name, "what": kind.what, "status": "ok",
        "start_bytes": start, "plain_peak_bytes": max(plain.peaks), "budget_bytes": budget,
        "checkpointed_peak_bytes": None if checkpointed is None else max(checkpointed.peaks),
        "peaks": ours.peaks, "predicted": ours.predicted, "planned_parts": len(planned), "parts": len(ours.peaks),
        "largest_error": max(errors, key=abs, default=None),
        "planned_peak_share": max((peak / budget for peak in planned), default=None),
        "unplanned_peak_share": max((peak / budget for peak in unplanned), default=None),
        "reasons": list(ours.status.reasons), "why_not": ours.status.why_not,
    }  # fmt: skip


def _timed(runs: dict[str, Run | None], rounds: int) -> None:
    """Steps of these trainings in turn."""
    for _ in range(rounds):
        for run in runs.values():
            if run is not None:
                run.counts_peaks = False
                run.step()


def told(found: dict) -> str:
    name = f"{found['kind']:<22}"
    if found["status"] != "ok":
        return "\n".join([f"{name} {found['status']}", *found["error"]])
    shown = [
        "equal" if found["bitwise_equal"] else "NOT EQUAL",
        f"{found['planned_parts']}/{found['parts']} planned",
        f"error {_percent(found['largest_error'])}",
        "of budget planned {}, unplanned {}".format(*(_percent(found[f"{p}_peak_share"]) for p in PARTS)),
        f"plain {found['plain_peak_bytes'] / found['budget_bytes']:.2f}",
    ]
    ms = found.get("step_ms", {})
    shown += [f"{name} x{ms[name] / ms['plain']:.2f}" for name in ms if name != "plain"]
    return "\n".join([f"{name} {', '.join(shown)}", *(f"    {r}" for r in (found["why_not"], *found["reasons"]) if r)])


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.2f} %"


if __name__ == "__main__":
    sys.exit(main())
