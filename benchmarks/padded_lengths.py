"""Padded batches of many lengths under ``lowtide.fit(model, budget=...)``: which plan each length runs under.

    python benchmarks/padded_lengths.py [--steps 200] [--fraction 0.4] [--max-plans 8]

Prints, for each length in the second half of the run: how often it came, the length that its plan was made for, what
that plan recomputes, and processor time as a share of the same step under one plan for the longest batch; then how the
steps of the whole run went. The loop is that of ``real_steps.py``, case trainer, without the Trainer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import dataclass

import torch
from real_step_loops import ACCUMULATED, ROWS, SEED, examples, llama, padded, padded_lengths
from step_probe import resident_bytes

import lowtide
from lowtide.measurement.allocator import peak_bytes


@dataclass(frozen=True)
class Step:
    """One step; ``planned_for`` is None where it ran without a plan."""

    length: int
    cpu_s: float
    planned_for: int | None
    overhead: float


def run(lengths: list[int], budget_bytes: int | None, max_plans: int, wait_after: int | None = None) -> list[Step]:
    torch.manual_seed(SEED)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fit = None if budget_bytes is None else lowtide.fit(model, budget=budget_bytes, max_plans=max_plans)
    rows = examples([(length,) for length in lengths])
    steps = []
    for at, length in enumerate(lengths):
        batch = padded(rows[ROWS * at : ROWS * (at + 1)])
        planned = 0 if fit is None else fit.status().planned_steps
        start_s = time.thread_time()
        model(**batch).loss.backward()
        cpu_s = time.thread_time() - start_s
        plan = None
        if fit is not None and fit.status().planned_steps > planned:
            plan = fit._lifecycle.plans_by_shape.plans[-1]
        planned_for = None if plan is None else plan.shapes[0].sizes[1]
        steps.append(Step(length, cpu_s, planned_for, 0.0 if plan is None else plan.plan.predicted_overhead))
        if at % ACCUMULATED == ACCUMULATED - 1:
            optimizer.step()
            optimizer.zero_grad()
        if fit is not None and at == wait_after:
            fit.wait()
    if fit is not None:
        print(fit.status())
        fit.remove()
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fraction", type=float, default=0.4)
    parser.add_argument("--max-plans", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lengths = [length for (length,) in padded_lengths(args.steps)]
    model, longest = llama(), padded(examples([(max(lengths),)]))
    activations = peak_bytes(lambda: model(**longest).loss.backward()) - sum(p.nbytes for p in model.parameters())
    batch_bytes = sum(t.nbytes for t in longest.values())
    budget = resident_bytes(llama(), gradients_to_come=True) + batch_bytes + int(args.fraction * activations)

    plain = run(lengths, None, 1)
    own = run(lengths, budget, args.max_plans)
    fixed = run([max(lengths)] * ACCUMULATED + lengths, budget, 1, wait_after=0)[ACCUMULATED:]

    found = defaultdict(list)
    for ours, theirs in list(zip(own, fixed, strict=True))[len(own) // 2 :]:
        found[ours.length].append((ours, theirs))
    print("length  steps  plan for  overhead  time / under one plan")
    for length, pairs in sorted(found.items()):
        last = pairs[-1][0]
        share = statistics.median(a.cpu_s / b.cpu_s for a, b in pairs)
        print(f"{length:6}  {len(pairs):5}  {last.planned_for!s:>8}  {last.overhead:8.1%}  {share:8.2f}")
    print("without a plan:", "".join("." if step.planned_for else "o" for step in own))
    print("plans used:", dict(Counter(step.planned_for for step in own)))
    due_s = sum(p.cpu_s * (1 + o.overhead) for p, o in zip(plain, own, strict=True))
    print(f"all steps: {sum(s.cpu_s for s in own) / sum(s.cpu_s for s in plain):.3f} of plain, "
          f"{sum(s.cpu_s for s in own) / due_s:.3f} of plain and what the plans predict; "
          f"under one plan {sum(s.cpu_s for s in fixed) / sum(s.cpu_s for s in plain):.3f} of plain")  # fmt: skip


if __name__ == "__main__":
    main()
