"""What a KV cache within a budget takes and costs, predicted and measured: on this CPU, and on the tests' accelerator.

    cd benchmarks
    python cache_offload.py            both, some minutes of one core; writes the results
    python cache_offload.py --only cpu

On the CPU, layers lie in a file that the system's page cache holds: the link is measured so too. Each round generates
tokens with transformers' own cache and with each budget, in turn; medians over the rounds. On the tests' accelerator
times are those of its own clock (tests/accelerator/README.md), where copies and kernels take what was set.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from provenance import HERE, provenance

from lowtide.graph.costs import Link
from lowtide.inference import LayerOffloadCache

RESULTS = HERE / "results" / "cache_offload.jsonl"
SHARES = (1.0, 0.75, 0.5, 0.25)
BATCH, PROMPTS, LAYERS, TOKENS, ROUNDS = 4, (1024, 4096), 12, 8, 5
STANDIN_PROMPT, COPY_BYTES_PER_MS = 128, (4e7, 1e7, 2e6)


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=8, vocab_size=2048,
        num_hidden_layers=LAYERS, max_position_embeddings=8192,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def page_cache_link(scratch_dir: Path, size: int = 1 << 25) -> Link:
    """From memory to a file that the system holds in memory, and back."""
    data = bytearray(os.urandom(1 << 20)) * (size >> 20)
    taken = {}
    with tempfile.TemporaryFile(dir=scratch_dir) as file:
        for name, move in (("store", os.pwrite), ("fetch", None)):
            times = []
            for _ in range(5):
                start = time.perf_counter()
                if move:
                    os.pwrite(file.fileno(), data, 0)
                else:
                    os.preadv(file.fileno(), [data], 0)
                times.append(time.perf_counter() - start)
            taken[name] = size / statistics.median(times)
    return Link(taken["store"], taken["fetch"])


class Generation:
    """Greedy tokens after a prompt of random keys and values, and the milliseconds that ``clock`` counts for each."""

    def __init__(self, llama: Any, prompt: int, device: str, clock: Callable[[], float]) -> None:
        self._model, self._device, self._clock = llama, device, clock
        config = llama.config
        numbers = torch.Generator("cpu").manual_seed(0)
        shape = (2, BATCH, config.num_key_value_heads, prompt, config.head_dim)
        self._prompt = [torch.randn(shape, generator=numbers).to(device) for _ in range(config.num_hidden_layers)]

    @torch.no_grad()
    def run(self, cache: Any) -> tuple[list[int], list[float]]:
        for index, (keys, values) in enumerate(self._prompt):
            cache.update(keys, values, index)
        token = torch.ones((BATCH, 1), dtype=torch.long, device=self._device)
        made, times = [], []
        for _ in range(TOKENS + 1):
            start = self._clock()
            out = self._model(input_ids=token, past_key_values=cache)
            times.append(self._clock() - start)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            made += token.flatten().tolist()
        return made, times[1:]  # the first one brings no layer ahead


def lines(
    llama: Any, prompt: int, clock: Callable[[], float], rounds: int, link: Link, device: str, scratch_dir: Path
) -> list[dict]:
    """A line for each budget, and for transformers' own cache."""
    generation = Generation(llama, prompt, device, clock)
    config = llama.config
    layer_bytes = 2 * BATCH * config.num_key_value_heads * (prompt + TOKENS + 1) * config.head_dim * 4
    whole = config.num_hidden_layers * layer_bytes
    plain_tokens, _ = generation.run(transformers.DynamicCache(config=config))
    times: dict[float | None, list[float]] = {share: [] for share in (None, *SHARES)}
    caches: dict[float, LayerOffloadCache] = {}
    for _ in range(rounds):
        for share, found in times.items():
            if share is None:
                tokens, taken = generation.run(transformers.DynamicCache(config=config))
            else:
                caches[share] = LayerOffloadCache(config, budget=int(share * whole), scratch_dir=scratch_dir)
                tokens, taken = generation.run(caches[share])
            if tokens != plain_tokens:
                raise SystemExit(f"other tokens within {share} of the cache")
            found.append(statistics.median(taken))
    plain_ms = statistics.median(times.pop(None))
    common = {"benchmark": "cache_offload", "place": device, "prompt": prompt, "batch": BATCH, "layers": LAYERS,
              "cache_bytes": whole, "plain_ms": plain_ms, "fetch_gb_per_s": link.fetch_bytes_per_s / 1e9}  # fmt: skip
    return [
        {
            **common,
            "budget": share,
            "predicted_bytes": caches[share].predicted_bytes(layer_bytes),
            "measured_bytes": caches[share].peak_bytes,
            "predicted_ms": caches[share].predicted_ms(layer_bytes, plain_ms, device=device, link=link),
            "measured_ms": statistics.median(taken),
        }
        for share, taken in times.items()
    ]


def on_cpu() -> list[dict]:
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for prompt in PROMPTS:
            link = page_cache_link(Path(folder))
            found += lines(model(), prompt, lambda: 1e3 * time.perf_counter(), ROUNDS, link, "cpu", Path(folder))
    return found


def on_the_standin() -> list[dict]:
    sys.path.insert(0, str(HERE.parent / "tests"))
    from accelerator import device as standin

    def clock() -> float:
        torch.accelerator.synchronize()
        return standin.host_clock_ms()

    found = []
    llama = copy.deepcopy(model()).to("standin")
    for speed in COPY_BYTES_PER_MS:
        link = Link(1e3 * speed, 1e3 * speed)
        with standin.times(copy_bytes_per_ms=speed), tempfile.TemporaryDirectory() as folder:
            found += lines(llama, STANDIN_PROMPT, clock, 1, link, "standin", Path(folder))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("cpu", "standin"))
    args = parser.parse_args()
    shared = provenance()
    known = [json.loads(x) for x in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    for place, made in (("cpu", on_cpu), ("standin", on_the_standin)):
        if args.only in (None, place):
            fresh = [{**line, **shared} for line in made()]
            known = [x for x in known if x["place"] != place] + fresh
            for line in fresh:
                print({k: line[k] for k in ("prompt", "budget", "plain_ms", "predicted_ms", "measured_ms")}, flush=True)
    RESULTS.write_text("".join(json.dumps(x) + "\n" for x in sorted(known, key=lambda x: x["place"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
