"""A Llama of opaque autograd Functions under checkpointing and under lowtide, at equal peaks: CPU, one thread.

    python benchmarks/opaque.py            eight layers; some minutes
    python benchmarks/opaque.py --quick    a toy, to see that it runs

Every norm, rotary embedding, SwiGLU, attention and the loss is a Function whose kernels are C or NumPy, seen by no
dispatcher (``tests/support/opaque_functions.py``). Plain checkpointing is around every layer and around every second
one. lowtide gets the peaks that these two had as budgets, and half of the plain step's activations. ``online`` rows are
steps without a plan at the same budgets: peak and bits of a first step, which proves all it lets go of. How the others
are measured: ``interleaved_methods.py``.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from interleaved_methods import SEED, interleaved, main, outcome
from provenance import provenance

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "opaque_cpu.jsonl"
TESTS = os.pathsep.join(filter(None, [str(HERE.parent / "tests"), os.environ.get("PYTHONPATH", "")]))


def lines(args: argparse.Namespace) -> list[dict]:
    """One line per method."""
    import torch
    from support.online_steps import online
    from support.opaque_functions import OpaqueLlama
    from support.training_steps import differing, plain

    import lowtide

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

    step("none")
    plain_peak, full_peak, every_2_peak = (outcome(model, partial(step, name))[0] for name in every)
    model.every = 0
    graph = lowtide.trace(model, ids)
    costs = lowtide.measure(graph)
    traced_peak = lowtide.simulate(graph, costs, lowtide.solve(graph, costs, method="none")).peak_bytes
    budgets = {
        "lowtide, peak of full checkpointing": full_peak,
        "lowtide, peak of every 2": every_2_peak,
        "lowtide, half of the activations": plain_peak // 2,
    }
    for name, activation_bytes in budgets.items():
        plans[name] = lowtide.solve(graph, costs, activation_bytes + graph.resident_bytes)
    case = f"opaque Llama, {layers} layers of {width}, 4 x {tokens} tokens"
    fields = {"benchmark": "opaque_cpu", "case": case}
    found = interleaved(args, model, [*every, *plans], step, **fields)
    for line in found:
        if (plan := plans.get(line["method"])) is not None:
            line["predicted_activation_bytes"] = plan.predicted_peak_bytes - graph.resident_bytes
            line |= {"predicted_overhead": plan.predicted_overhead, "gap": plan.gap}
    found[0]["predicted_plain_bytes"] = traced_peak - graph.resident_bytes

    model.every = 0
    expected = plain(model, ids)
    made_bytes = online(model, ids, float("inf"))[1].live.peak  # new gradients included
    for name, activation_bytes in budgets.items():
        result, tape = online(model, ids, made_bytes * activation_bytes / plain_peak)
        found.append({
            **fields,
            "method": name.replace("lowtide", "online"),
            "budget_fraction": activation_bytes / plain_peak,
            "fraction": tape.live.peak / made_bytes,
            "bitwise_equal": differing(expected, result) == [],
            "num_released": tape.releaser.num_released,
            "seed": SEED,
            **provenance(),
        })  # fmt: skip
    return found


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__, RESULTS, lines, PYTHONPATH=TESTS))
