"""A process of its own, on a stand-in whose second device gives compiled graphs their values: lengths that change.

    STANDIN_DEVICES=2 python lengths_on_cuda.py BUDGET LENGTH...

The first length is the longest. Prints a JSON line for each: the peak that PyTorch's allocator counts, what the plan
predicts for the longest, and whether loss and gradients are those of layers that PyTorch compiled for all lengths.
"""

import gc
import json
import sys
import warnings

import torch
from support.compiled_layers import Decoder

import lowtide
from cuda_standin import compiled_values

LAYERS, WIDTH = 4, 128


def main(budget, lengths):
    warnings.simplefilter("ignore")
    compiled_values.install()
    plain = made()
    for block in plain.blocks:
        block.compile(fullgraph=True, dynamic=True)
    # As lowtide has it: equal sizes are not taken for one, and numbers in a layer's code stay numbers.
    with torch.fx.experimental._config.patch(use_duck_shape=False), torch._dynamo.config.patch(specialize_float=True):
        expected = {length: step(plain, plain, length) for length in lengths}
    del plain, block
    torch._dynamo.reset()
    model = made()
    gc.collect()
    compiled = lowtide.compile(model, budget=budget, dynamic=True)
    for length in lengths:
        first = step(compiled, model, length)
        again = step(compiled, model, length)  # by the plan, and proven at this length
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        compiled(ids(length)).backward()
        plan = compiled.plan
        line = {
            "length": length,
            "counted_bytes": torch.cuda.max_memory_allocated() - plan.resident_bytes,
            "predicted_bytes": plan.predicted_peak_bytes - plan.resident_bytes,
            "plain_bytes": plan.plain_peak_bytes - plan.resident_bytes,
            "equal": all(torch.equal(a, b) for found in (first, again) for a, b in zip(found, expected[length])),
            "plans": len(compiled.plans), "reason": compiled.reason, "variants": [v.name for v in plan.variants],
        }  # fmt: skip
        print(json.dumps(line), flush=True)


def made():
    torch.manual_seed(0)
    model = Decoder(LAYERS, WIDTH).cuda()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def ids(length):
    return torch.randint(0, 64, (4, length), generator=torch.Generator().manual_seed(length)).cuda()


def step(run, model, length):
    for parameter in model.parameters():
        parameter.grad.zero_()
    loss = run(ids(length))
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]


if __name__ == "__main__":
    main(sys.argv[1], list(map(int, sys.argv[2:])))
