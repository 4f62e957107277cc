"""A compiled decoder, by PyTorch's options and by lowtide: CPU, one thread, one JSON line per method.

    python benchmarks/compiled.py            eight layers; an hour, half of it compiling
    python benchmarks/compiled.py --only layers   without whole graphs and ``lowtide.fit``: the file's other lines stay
    python benchmarks/compiled.py --quick    a toy, to see that it runs

The decoder is that of ``decoder.py``. It is compiled layer by layer, and again as one graph ("whole graph"). PyTorch's
ways: nothing else, full and selective checkpointing (matrix products and attention kept), and
``activation_memory_budget``. lowtide gets the peaks that these had as budgets, and some below: ``lowtide.compile``, and
``lowtide.fit`` on the layers as PyTorch compiles them alone. The cache of compiled code is empty at first, but for
--quick.
Memory stays in the process. All methods run interleaved on the same weights: process CPU time as a ratio to compiling
the layers alone just before and just after. Peaks are the allocator's. Gradients are compared with compiling alone, of
a whole graph with compiling that alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from interleaved_methods import MALLOC_FIXED
from paired_times import paired_times
from provenance import provenance
from result_lines import replace_lines

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "compiled_cpu.jsonl"
SEED = 0
PLAIN = "compile alone"
WHOLE = ", whole graph"
MEMORY_BUDGETS = (0.7, 0.5, 0.3, 0.1)
AT_PEAK_OF = (
    "selective",
    "memory budget 0.7",
    "memory budget 0.5",
    "memory budget 0.3",
    "memory budget 0.1",
    "full checkpointing",
)
WHOLE_AT_PEAK_OF = ("selective", "memory budget 0.5", "memory budget 0.1", "full checkpointing")
FIT_AT_PEAK_OF = ("memory budget 0.3", "memory budget 0.1", "full checkpointing")
FIT_FRACTIONS = (0.26, 0.22)
FRACTIONS = (0.28, 0.22, 0.19, 0.15)  # of the activations of compiling alone
FRACTIONS_OF_EAGER = (0.427, 0.28)


def main() -> int:
    args = _arguments()
    if args.here:
        for line in Bench(args).lines():
            print(json.dumps(line), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as empty:
        environment = {**os.environ, **MALLOC_FIXED, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if not args.quick:
            environment |= {"TORCHINDUCTOR_CACHE_DIR": empty, "LOWTIDE_CACHE_DIR": empty}
        found = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--here"], env=environment, stdout=subprocess.PIPE, check=False
        )
    if found.returncode == 0:
        lines = [json.loads(text) for text in found.stdout.splitlines()]
        old = [json.loads(text) for text in args.out.read_text().splitlines()] if args.only else []
        order = dict.fromkeys(line["method"] for line in [*old, *lines])
        replace_lines(args.out, lines, by="method", order=list(order))
        print(f"wrote {args.out}", file=sys.stderr)
    return found.returncode


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of every method (default 9)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="a toy model, one round, two methods of each side")
    parser.add_argument("--only", choices=["layers"], help="what is compiled layer by layer: the other lines stay")
    parser.add_argument("--here", action="store_true", help="in this process, lines to stdout")
    return parser.parse_args()


class Bench:
    """One decoder, and the ways to run its layers."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        torch.set_num_threads(1)
        torch._dynamo.config.recompile_limit = 256
        layers, hidden, inner, heads, tokens, words = (
            (2, 32, 64, 2, 32, 64) if args.quick else (8, 512, 1408, 8, 512, 4096)
        )
        self.args = args
        self.case = f"decoder, {layers} layers of {hidden}, 4 x {tokens} tokens, float32"
        config = transformers.LlamaConfig(
            hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner, num_attention_heads=heads,
            num_key_value_heads=heads // 2, vocab_size=words, use_cache=False, attn_implementation="sdpa",
        )  # fmt: skip
        torch.manual_seed(SEED)
        self.model = transformers.LlamaForCausalLM(config).train()
        ids = torch.randint(0, words, (4, tokens))
        self.batch = {"input_ids": ids, "labels": ids}
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.ways: dict[str, Callable[[], float]] = {}
        self.facts: dict[str, dict] = {}

    def lines(self) -> list[dict]:
        from lowtide.measurement.timing import time_ms

        self._pytorchs_ways()
        if not self.args.only:
            self._pytorchs_whole_graphs()
        found = {name: self._outcome(name) for name in self.ways}
        peaks = {name: peak for name, (peak, _) in found.items()}
        self._lowtides_ways(peaks)
        if not self.args.only:
            self._lowtides_whole_graphs(peaks)
            self._fitted_ways(peaks)
        found |= {name: self._outcome(name) for name in self.ways if name not in found}
        plain, times, ratios = paired_times(
            partial(time_ms, self.ways[PLAIN]),
            {name: partial(time_ms, way) for name, way in self.ways.items() if name != PLAIN},
            rounds=1 if self.args.quick else self.args.rounds,
            on_round=lambda done, total: print(f"round {done} of {total}", file=sys.stderr),
            seed=SEED,
        )
        plain_bytes, _ = found[PLAIN]
        lines = []
        for name, fact in self.facts.items():
            line = {"benchmark": "compiled_cpu", "case": self.case, "method": name, **fact}
            if name in found:
                peak, results = found[name]
                _, reference = found[PLAIN + WHOLE if name.endswith(WHOLE) else PLAIN]
                ratio = ratios.get(name)
                line |= {
                    "activation_bytes": peak,
                    "fraction": peak / plain_bytes,
                    "bitwise_equal": results == reference,
                    "time_ms": (times[name] if ratio else plain).median_ms,
                    "time_ratio": ratio.median_ms if ratio else 1.0,
                    "time_ratio_quartiles": ratio.quartiles if ratio else [1.0, 1.0],
                }
            lines.append(line | {"seed": SEED, "rounds": 1 if self.args.quick else self.args.rounds, **provenance()})
        return lines

    def _pytorchs_ways(self) -> None:

        calls: dict[str, tuple[Callable | None, list]] = {"eager": (None, [])}
        calls[PLAIN] = (None, self._compiled())
        calls["full checkpointing"] = (_checkpoint, calls[PLAIN][1])
        calls["full checkpointing, of compiled calls"] = (
            None,
            [partial(_checkpoint, call) for call in calls[PLAIN][1]],
        )
        calls["selective"] = (None, self._compiled(wrap=_selectively))
        for budget in MEMORY_BUDGETS[-1:] if self.args.quick else MEMORY_BUDGETS:
            calls[f"memory budget {budget}"] = (None, self._compiled(activation_memory_budget=budget))
        if self.args.quick:
            del calls["selective"]
        for name, (checkpoint, compiled) in calls.items():

            def run(checkpoint=checkpoint, compiled=compiled) -> float:
                with self._layers(compiled or [None] * len(self.model.model.layers), checkpoint):
                    return self._step(self.model)

            self._add(name, run)
        self.alone = calls[PLAIN][1]

    def _pytorchs_whole_graphs(self) -> None:
        ways: dict[str, tuple[Callable | None, dict]] = {
            PLAIN: (None, {}),
            "full checkpointing": (_checkpoint, {}),
            "selective": (_checkpoint_selectively, {}),
        }
        ways |= {f"memory budget {budget}": (None, {"activation_memory_budget": budget}) for budget in MEMORY_BUDGETS}
        for name in [PLAIN, "memory budget 0.1"] if self.args.quick else ways:
            checkpoint, functorch = ways[name]
            call = _compiled(self.model._call_impl, **functorch)

            def run(checkpoint=checkpoint, call=call) -> float:
                with self._layers([None] * len(self.model.model.layers), checkpoint):
                    return self._step(call)

            self._add(name + WHOLE, run)

    def _add(self, name: str, run: Callable[[], float]) -> None:
        """A way of PyTorch's, after its first step."""
        import torch

        self._say(name)
        self.ways[name] = run
        start = time.perf_counter()
        torch.manual_seed(SEED)
        run()
        self.facts[name] = {"status": "ok", "first_step_s": time.perf_counter() - start}

    @contextmanager
    def _layers(self, calls: list[Callable | None], checkpoint: Callable | None = None) -> Iterator[None]:
        """Each layer is called in its own of these ways."""
        layers = self.model.model.layers
        for layer, call in zip(layers, calls, strict=True):
            layer._compiled_call_impl = call
            layer.gradient_checkpointing = checkpoint is not None
            layer._gradient_checkpointing_func = checkpoint
        try:
            yield
        finally:
            for layer in layers:
                layer._compiled_call_impl, layer.gradient_checkpointing = None, False

    def _compiled(self, wrap: Callable | None = None, **functorch) -> list[Callable]:
        """Every layer's call, compiled with settings of its own."""
        calls = [layer._call_impl if wrap is None else wrap(layer) for layer in self.model.model.layers]
        return [_compiled(call, **functorch) for call in calls]

    def _lowtides_ways(self, peaks: dict[str, int]) -> None:
        import lowtide

        compiled = lowtide.compile(self.model, budget=None)
        calls = [layer._compiled_call_impl for layer in self.model.model.layers]
        call, self.model._compiled_call_impl = self.model._compiled_call_impl, None
        for layer in self.model.model.layers:
            layer._compiled_call_impl = None  # another plan is for the same model
        budgets = {f"lowtide, peak of {name}": peaks[name] for name in AT_PEAK_OF if name in peaks}
        budgets |= {f"lowtide {fraction} of eager": int(fraction * peaks["eager"]) for fraction in FRACTIONS_OF_EAGER}
        budgets |= {f"lowtide {fraction}": int(fraction * peaks[PLAIN]) for fraction in FRACTIONS}
        self._lowtides_plans(compiled, partial(self._by_layer, call, calls), budgets)

    def _lowtides_whole_graphs(self, peaks: dict[str, int]) -> None:
        import lowtide

        with self._layers([None] * len(self.model.model.layers)):
            compiled = lowtide.compile(self.model, layers=["*"], budget=None)
        call, self.model._compiled_call_impl = self.model._compiled_call_impl, None
        budgets = {
            f"lowtide, peak of {name}{WHOLE}": peaks[name + WHOLE] for name in WHOLE_AT_PEAK_OF if name + WHOLE in peaks
        }
        self._lowtides_plans(compiled, partial(self._whole, call), budgets)

    def _lowtides_plans(self, compiled, calls: Callable, budgets: dict[str, int]) -> None:
        """``compiled``'s plans for these bytes of activations; under ``calls()`` the model is compiled so."""
        import lowtide

        self._say("lowtide")
        start = time.perf_counter()
        with calls():
            self._step(compiled)
        first_s = time.perf_counter() - start
        plan = compiled.plan
        for name, activations in budgets.items():
            self._say(name)
            start = time.perf_counter()
            fact = {"status": "ok", "first_step_s": first_s, "budget_bytes": activations}
            try:
                compiled.set_budget(activations + plan.resident_bytes)
            except lowtide.BudgetInfeasibleError as error:
                fact |= {"status": "infeasible", "least_bytes": error.least_bytes - plan.resident_bytes}
                self.facts[name] = fact | {"planning_s": time.perf_counter() - start}
                continue
            chosen = compiled.plan

            def run(chosen=chosen) -> float:
                with calls():
                    compiled.use(chosen)
                    return self._step(compiled)

            self.ways[name] = run
            self.facts[name] = fact | {
                "planning_s": time.perf_counter() - start,
                "predicted_activation_bytes": chosen.predicted_peak_bytes - chosen.resident_bytes,
                "predicted_overhead": chosen.predicted_overhead,
                "variants": {v.name: v.layers for v in chosen.variants},
            }

    @contextmanager
    def _by_layer(self, call: Callable, calls: list[Callable]) -> Iterator[None]:
        """The model is called by ``call``, and each layer in its own of ``calls``."""
        with self._layers(calls), self._whole(call):
            yield

    @contextmanager
    def _whole(self, call: Callable) -> Iterator[None]:
        """The model is called in this way."""
        self.model._compiled_call_impl = call
        try:
            yield
        finally:
            self.model._compiled_call_impl = None

    def _fitted_ways(self, peaks: dict[str, int]) -> None:
        """Each call of a layer is kept or runs again, as ``fit`` decides."""
        import lowtide

        def loss_of(model, batch):
            return model(**batch).loss

        budgets = {f"fit, peak of {name}": peaks[name] for name in FIT_AT_PEAK_OF if name in peaks}
        budgets |= {f"fit {fraction}": int(fraction * peaks[PLAIN]) for fraction in FIT_FRACTIONS}
        with self._layers(self.alone):
            resident = lowtide.trace(self.model, self.batch, step=loss_of).resident_bytes
        for name, activations in budgets.items():
            self._say(name)
            start = time.perf_counter()
            fact = {"status": "ok", "budget_bytes": activations}
            try:
                with self._layers(self.alone):
                    fit = lowtide.fit(self.model, self.batch, budget=activations + resident, step=loss_of)
                    fit.remove()
            except lowtide.BudgetInfeasibleError as error:
                fact |= {"status": "infeasible", "least_bytes": error.least_bytes - resident}
                self.facts[name] = fact | {"planning_s": time.perf_counter() - start}
                continue
            plan = fit.plan

            def run(plan=plan) -> float:
                with self._layers(self.alone), lowtide.apply(self.model, plan):
                    return self._step(self.model)

            self.ways[name] = run
            self.facts[name] = fact | {
                "planning_s": time.perf_counter() - start,
                "predicted_activation_bytes": plan.predicted_peak_bytes - plan.resident_bytes,
                "predicted_overhead": plan.predicted_overhead,
            }

    def _step(self, model) -> float:
        loss = model(**self.batch).loss
        loss.backward()
        return loss.item()

    def _outcome(self, name: str) -> tuple[int, list[bytes]]:
        """Peak bytes, and digests of loss and gradients."""
        import hashlib

        import torch

        from lowtide.measurement.allocator import peak_bytes

        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        losses: list[float] = []
        peak = peak_bytes(lambda: losses.append(self.ways[name]()))
        tensors = [torch.tensor(losses), *(p.grad for p in self.model.parameters())]
        return peak, [hashlib.sha256(t.numpy().tobytes()).digest() for t in tensors]

    def _say(self, what: str) -> None:
        print(what, file=sys.stderr, flush=True)


def _checkpoint(function, *args, **kwargs):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, *args, use_reentrant=False, **kwargs)


def _selectively(layer):
    """``layer``'s call under selective checkpointing, to be compiled as a whole: the compiler sees the policy."""
    return partial(_checkpoint_selectively, layer._call_impl)


def _checkpoint_selectively(function, *args, **kwargs):
    import torch
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = [aten.mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default]
    return _checkpoint(function, *args, context_fn=partial(create_selective_checkpoint_contexts, kept), **kwargs)


def _compiled(call: Callable, **functorch) -> Callable:
    """``call``, compiled as one graph with these settings."""
    import torch
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def backend(graph, inputs):
        with config.patch(functorch):
            return compile_fx(graph, inputs)

    return torch.compile(call, backend=backend, fullgraph=True, dynamic=False)


if __name__ == "__main__":
    sys.exit(main())
