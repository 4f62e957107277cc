"""The longest sequence that a small Llama-shaped model trains on within a limit: CPU, one thread, one line per method.

    python benchmarks/long_sequences.py              some ten minutes
    python benchmarks/long_sequences.py --quick      a toy, to see that it runs

The limit is for the allocator's peak, weights and gradients included. Each method is asked for twice the tokens until
it fails, then the gap is halved until it is a sixteenth. What a method is said to fit has run, its peak measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from provenance import provenance

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "long_sequences_cpu.jsonl"
SEED = 0
FIRST_TOKENS = 64
METHODS = {
    "plain": None,
    "transformers full": None,
    "lowtide": {},
    "lowtide, chunked loss": {"chunk_loss": True},
    "lowtide, chunked loss and tiles": {"chunk_loss": True, "tile_mlp": 4},
}


def main() -> int:
    import torch
    import transformers

    args = _arguments()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with args.out.open("w") as lines:
        for method in METHODS:
            print(json.dumps(Search(method, args).line()), file=lines, flush=True)
    print(f"wrote {args.out}", file=sys.stderr)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mib", type=int, default=48)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="a toy model")
    return parser.parse_args()


class Search:
    """One method and the longest sequence that it fits."""

    def __init__(self, method: str, args: argparse.Namespace) -> None:
        import torch
        import transformers

        layers, hidden, inner, vocabulary = (1, 32, 88, 256) if args.quick else (4, 128, 344, 8192)
        self.method, self.limit_bytes = method, (2 if args.quick else args.limit_mib) * 2**20
        config = transformers.LlamaConfig(
            hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner, num_attention_heads=8,
            num_key_value_heads=4, vocab_size=vocabulary, max_position_embeddings=2**16, use_cache=False,
        )  # fmt: skip
        torch.manual_seed(SEED)
        self.model = transformers.LlamaForCausalLM(config).train()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.resident_bytes = 2 * sum(p.nbytes for p in self.model.parameters())
        if method == "transformers full":
            self.model.activation_checkpointing_enable()

    def line(self) -> dict:
        fits, too_long = 0, FIRST_TOKENS
        found: dict = {}
        while outcome := self._outcome(too_long):
            fits, too_long, found = too_long, 2 * too_long, outcome
        while too_long - fits > max(1, too_long // 16):
            tokens = (fits + too_long) // 2
            if outcome := self._outcome(tokens):
                fits, found = tokens, outcome
            else:
                too_long = tokens
        config = self.model.config
        return {
            "benchmark": "long_sequences_cpu",
            "method": self.method,
            "limit_bytes": self.limit_bytes,
            "resident_bytes": self.resident_bytes,
            "tokens": fits,
            **found,
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "vocabulary": config.vocab_size,
            "dtype": "float32",
            "seed": SEED,
            **provenance(),
        }

    def _outcome(self, tokens: int) -> dict | None:
        """Peak and time of a step on so many tokens; None: it does not fit."""
        import torch

        import lowtide
        from lowtide.measurement.allocator import peak_bytes

        print(f"{self.method}: {tokens} tokens", file=sys.stderr, flush=True)
        ids = torch.randint(0, self.model.config.vocab_size, (1, tokens))
        batch = {"input_ids": ids, "labels": ids}
        options = METHODS[self.method]
        seconds = []

        def step() -> None:
            start = time.process_time()
            self.model(**batch).loss.backward()
            seconds.append(time.process_time() - start)

        with ExitStack() as fitted:
            if options is not None:
                try:
                    # The loss alone comes back: a caller that held the output would keep the logits through backward.
                    fit = lowtide.fit(self.model, batch, step=_loss, budget=self.limit_bytes, **options)
                    fitted.enter_context(fit)
                except lowtide.BudgetInfeasibleError:
                    return None
            peak = self.resident_bytes + peak_bytes(step)
            step()
        return {"peak_bytes": peak, "step_s": seconds[-1]} if peak <= self.limit_bytes else None


def _loss(model, batch):
    return model(**batch).loss


if __name__ == "__main__":
    sys.exit(main())
