"""Planning large models on a machine that could not hold one of their layers: time and memory of the whole process.

    cd benchmarks
    python hollow_large.py            both models, each in a process of its own; writes the results
    python hollow_large.py 405b       one model, printed and not written

One JSON line for each model: seconds of each stage, CPU seconds and peak resident memory of the process, imports
included. What it takes to plan is made up (``plausible`` times from bytes); nothing here says how fast a device is.
"""

import time

START = time.perf_counter()

import json  # noqa: E402
import resource  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "hollow_large_cpu.jsonl"
TOKENS = 8192
SIZES = {
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    "405b": dict(hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128),
}


def measure(name: str, device: str) -> dict:
    """The line of one model, in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: F401

    import lowtide
    from lowtide.hollow.models import language_batch

    torch.set_num_threads(1)
    seconds = {"imports": time.perf_counter() - START}
    config = LlamaConfig(**SIZES[name], num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072)
    config.dtype = torch.bfloat16
    begun = time.perf_counter()
    graph = lowtide.trace(config, language_batch(1, TOKENS), device=device, optimizer="adamw")
    seconds["trace"] = time.perf_counter() - begun
    size = [s.bytes for s in graph.storages]
    costs = lowtide.Costs(tuple(0.01 + sum(size[s] for s in {*o.reads, *o.makes}) / 2e9 for o in graph.ops))
    begun = time.perf_counter()
    plan = lowtide.solve(graph, costs, "30%")
    seconds["solve"] = time.perf_counter() - begun
    begun = time.perf_counter()
    try:
        lowtide.solve(graph, costs, "10GiB")
        raise AssertionError("it cannot fit")
    except lowtide.BudgetInfeasibleError:
        seconds["refuse a budget below the parameters"] = time.perf_counter() - begun
    return {
        "model": f"llama {name}",
        "tokens": TOKENS,
        "kernels": device,
        "resident_bytes": graph.resident,
        "plain_peak_bytes": plan.plain_peak_bytes,
        "plan_peak_bytes": plan.predicted_peak_bytes,
        "ops": len(graph.ops),
        "seconds": {stage: round(s, 2) for stage, s in seconds.items()},
        "process_s": round(time.perf_counter() - START, 1),
        "process_cpu_s": round(time.process_time(), 1),
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "assumed": graph.provenance["assumed"].splitlines(),
    }


def main() -> int:
    if len(sys.argv) == 3:
        print(json.dumps(measure(*sys.argv[1:])))
        return 0
    from provenance import provenance

    shared, lines = provenance(), []
    for name in sys.argv[1:] or SIZES:
        for device in ("cpu", "cuda"):
            child = subprocess.run([sys.executable, __file__, name, device], capture_output=True, text=True, check=True)
            lines.append({"benchmark": "hollow_large_cpu", **json.loads(child.stdout.splitlines()[-1]), **shared})
            print(json.dumps(lines[-1]), flush=True)
    if not sys.argv[1:]:
        RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
