"""``lowtide.checkpoint`` beside ``torch.utils.checkpoint`` on a decoder, each layer checkpointed: CPU, one thread.

    python benchmarks/checkpoint_calls.py            the decoder of ``decoder.py``; some minutes
    python benchmarks/checkpoint_calls.py --quick    a toy, to see that it runs

Memory stays in the process (``MALLOC_MMAP_MAX_=0``, no trimming), so that page faults do not flatter lean steps. All
methods run interleaved on the same weights. Time is process CPU time, as a ratio to the plain step just before and
just after; peaks are the allocator's. The first step under ``lowtide.checkpoint`` proves each kind of op; it has a line
of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from paired_times import paired_times
from provenance import provenance

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "checkpoint_calls_cpu.jsonl"
SEED = 0
MALLOC_FIXED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}


def main() -> int:
    args = _arguments()
    if args.here:
        for line in lines(args):
            print(json.dumps(line), flush=True)
        return 0
    environment = {**os.environ, **MALLOC_FIXED, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
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
    import transformers
    from torch.utils.checkpoint import checkpoint

    import lowtide
    from lowtide.measurement.allocator import peak_bytes
    from lowtide.measurement.timing import time_ms
    from lowtide.tracing.restore import same_bits

    torch.set_num_threads(1)
    layers, hidden, inner, heads, tokens = (2, 64, 176, 4, 64) if args.quick else (8, 512, 1408, 8, 512)
    config = transformers.LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=heads // 2, vocab_size=512, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(SEED)
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(0, 512, (4, tokens))
    calls = {
        "none": None,
        "torch.utils.checkpoint": partial(checkpoint, use_reentrant=False),
        "lowtide.checkpoint": lowtide.checkpoint,
    }

    def use(call) -> None:
        for layer in model.model.layers:
            layer.gradient_checkpointing = call is not None
            layer._gradient_checkpointing_func = call

    def step(name: str) -> float:
        use(calls[name])
        loss = model(input_ids=ids, labels=ids).loss
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
    plain_peak, reference = outcome("none")
    first_ms = {name: time_ms(partial(step, name)) for name in calls}
    plain, times, ratios = paired_times(
        partial(time_ms, partial(step, "none")),
        {name: partial(time_ms, partial(step, name)) for name in calls if name != "none"},
        rounds=1 if args.quick else args.rounds,
        on_round=lambda done, total: print(f"round {done} of {total}", file=sys.stderr),
        seed=SEED,
    )
    for name in calls:
        peak, results = outcome(name)
        line = {
            "benchmark": "checkpoint_calls_cpu",
            "case": f"decoder, {layers} layers of {hidden}, 4 x {tokens} tokens",
            "method": name,
            "activation_bytes": peak,
            "fraction": peak / plain_peak,
            "bitwise_equal": all(same_bits(a, b) for a, b in zip(results, reference, strict=True)),
            "first_step_ratio": first_ms[name] / plain.median_ms,
        }
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
