"""A Llama of opaque autograd Functions under checkpointing and under lowtide, at equal peaks: CPU, one thread.

    python benchmarks/opaque.py            eight layers; some minutes
    python benchmarks/opaque.py --quick    a toy, to see that it runs

Every norm, rotary embedding, SwiGLU, attention and the loss is a Function whose kernels are C or NumPy, seen by no
dispatcher (``tests/support/opaque_functions.py``). Plain checkpointing is around every layer and around every second
one. lowtide gets the peaks that these two had as budgets, and half of the plain step's activations. Memory stays in the
process, so that page faults do not flatter lean steps. All methods run interleaved on the same weights. Time is process
CPU time, as a ratio to the plain step just before and just after; peaks are the allocator's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from checkpoint_calls import MALLOC_FIXED
from paired_times import paired_times
from provenance import provenance

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "opaque_cpu.jsonl"
SEED = 0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def main() -> int:
    args = _arguments()
    if args.here:
        for line in lines(args):
            print(json.dumps(line), flush=True)
        return 0
    paths = os.pathsep.join(filter(None, [str(HERE.parent / "tests"), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **MALLOC_FIXED, **ONE_THREAD, "PYTHONPATH": paths}
    found = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--here"], env=environment, stdout=subprocess.PIPE, check=False
    )
    if found.returncode == 0:
        args.out.write_bytes(found.stdout)
        print(f"wrote {args.out}", file=sys.stderr)
    return found.returncode


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of every method (default 7)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="a toy model, one round")
    parser.add_argument("--here", action="store_true", help="in this process, lines to stdout")
    return parser.parse_args()


def lines(args: argparse.Namespace) -> list[dict]:
    """One line per method."""
    import torch
    from support.opaque_functions import OpaqueLlama

    import lowtide
    from lowtide.measurement.allocator import peak_bytes
    from lowtide.measurement.timing import time_ms
    from lowtide.tracing.restore import same_bits

    torch.set_num_threads(1)
    layers, width, heads, tokens, words = (2, 32, 2, 32, 64) if args.quick else (8, 512, 8, 512, 1024)
    torch.manual_seed(SEED)
    model = OpaqueLlama(layers=layers, width=width, heads=heads, words=words, length=tokens)
    ids = torch.randint(0, words, (4, tokens))
    every = {"none": 0, "full checkpointing": 1, "every 2": 2}
    plans: dict[str, lowtide.Plan] = {}

    def step(name: str) -> float:
        model.every = every.get(name, 0)
        if name in plans:
            with lowtide.apply(model, plans[name]):
                loss = model(ids)
        else:
            loss = model(ids)
        loss.backward()
        return loss.item()

    def outcome(name: str) -> tuple[int, list]:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        losses = []
        peak = peak_bytes(lambda: losses.append(step(name)))
        return peak, [torch.tensor(losses), *(p.grad.clone() for p in model.parameters())]

    found: list[dict] = []
    step("none")
    outcomes = {name: outcome(name) for name in every}
    plain_peak, reference = outcomes["none"]
    model.every = 0
    graph = lowtide.trace(model, ids)
    costs = lowtide.measure(graph)
    traced_peak = lowtide.simulate(graph, costs, lowtide.solve(graph, costs, method="none")).peak_bytes
    budgets = {
        "lowtide, peak of full checkpointing": outcomes["full checkpointing"][0],
        "lowtide, peak of every 2": outcomes["every 2"][0],
        "lowtide, half of the activations": plain_peak // 2,
    }
    for name, activation_bytes in budgets.items():
        plans[name] = lowtide.solve(graph, costs, activation_bytes + graph.resident_bytes)
    names = [*every, *plans]
    first_ms = {name: time_ms(partial(step, name)) for name in names}
    plain, times, ratios = paired_times(
        partial(time_ms, partial(step, "none")),
        {name: partial(time_ms, partial(step, name)) for name in names if name != "none"},
        rounds=1 if args.quick else args.rounds,
        on_round=lambda done, total: print(f"round {done} of {total}", file=sys.stderr),
        seed=SEED,
    )
    for name in names:
        peak, results = outcome(name)
        line = {
            "benchmark": "opaque_cpu",
            "case": f"opaque Llama, {layers} layers of {width}, 4 x {tokens} tokens",
            "method": name,
            "activation_bytes": peak,
            "fraction": peak / plain_peak,
            "bitwise_equal": all(same_bits(a, b) for a, b in zip(results, reference, strict=True)),
            "first_step_ratio": first_ms[name] / plain.median_ms,
        }
        if name in plans:
            line |= {
                "predicted_activation_bytes": plans[name].predicted_peak_bytes - graph.resident_bytes,
                "predicted_overhead": plans[name].predicted_overhead,
                "gap": plans[name].gap,
            }
        line |= {"predicted_plain_bytes": traced_peak - graph.resident_bytes} if name == "none" else {}
        ratio = ratios.get(name)
        line |= {
            "time_ms": (times[name] if ratio else plain).median_ms,
            "time_ratio": ratio.median_ms if ratio else 1.0,
            "time_ratio_quartiles": ratio.quartiles if ratio else [1.0, 1.0],
        }
        found.append(line | {"seed": SEED, "rounds": 1 if args.quick else args.rounds, **provenance()})
    return found


if __name__ == "__main__":
    sys.exit(main())
