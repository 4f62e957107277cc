"""A process of its own, on a stand-in with two devices: compiled layers under a plan in a CUDA graph, captured by hand.

Prints a JSON line: what a capture before there is a plan raises, and after two steps whether the graph has captured
the kernels of the plan, and what the planned step counts before and after.
"""

import json
import warnings

import pytest
import torch
from support.compiled_on_cuda import TOKENS, compiled_values, loss_of, made

import lowtide


def main():
    warnings.simplefilter("ignore")
    compiled_values.install()
    ids = torch.randint(0, 64, (4, TOKENS), device="cuda")
    model = made("float32")
    compiled = lowtide.compile(model, budget="60%")

    def captured(batch):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss_of(compiled, batch, "float32").backward()
        return graph

    def refused(batch):
        with pytest.raises(lowtide.PlanMismatchError) as error:
            captured(batch)
        return str(error.value)

    line = {"refused": [refused(ids)]}
    with torch.cuda.stream(torch.cuda.Stream()):  # as PyTorch asks for a warm-up
        for _ in range(2):
            loss_of(compiled, ids, "float32").backward()
    before = compiled.status()
    captured(ids).replay()
    after = compiled.status()
    line |= {
        "steps_captured": after.steps - before.steps,
        "in_force": after.in_force,
        "variants": [v.name for v in compiled.plan.variants],
        "reason": compiled.reason,
    }
    line["refused"].append(refused(ids[:2]))
    loss_of(compiled, ids, "float32").backward()
    line["later_planned_steps"] = compiled.status().planned_steps - after.planned_steps
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
