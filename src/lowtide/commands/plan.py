"""``lowtide plan``: does a training step fit a device that is not here, under which plan, and what if it does not."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.commands.files import write
from lowtide.commands.verbs import add_verb, budget_of
from lowtide.scripts import BadUsageError

if TYPE_CHECKING:
    from lowtide.foresight.changes import Change
    from lowtide.foresight.forecast import Forecast
    from lowtide.foresight.subjects import Subject
    from lowtide.foresight.training_setup import TrainingSetup

_EPILOG = """\
Nothing is computed and no weights are loaded: the model's own code runs on tensors without memory.

examples:
  lowtide plan --model llama-3.1-8b --device h100 --seq-len 8192 --batch-size 2 --optimizer adamw --budget auto
  lowtide plan --model train.py:setup --device rtx4090
  lowtide plan --model llama-3.1-70b --device h100 --gpus 16 --sharding fsdp --seq-len 4096
  lowtide plan --model llama-3.1-70b --device h100 --tensor-parallel 8 --pipeline-parallel 2 --accumulate 8
"""


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    what = "whether a training step fits a device that is not here, and under which plan"
    parser = add_verb(verbs, "plan", run, what, epilog=_EPILOG)
    add_setup_arguments(parser)
    parser.add_argument("--batch-size", type=int, default=1, help="sequences of a micro-batch of a rank (default 1)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of one optimizer's step (default 1)")
    parser.add_argument("--data-parallel", type=int, metavar="N", help="data parallel ranks")
    parser.add_argument("--tensor-parallel", type=int, metavar="N", help="ranks that share each layer")
    parser.add_argument("--sequence-parallel", action="store_true", help="they share the tokens between layers, too")
    parser.add_argument("--expert-parallel", type=int, default=1, metavar="N", help="ranks that share experts")
    parser.add_argument("--pipeline-parallel", type=int, metavar="N", help="stages, each of a part of the layers")
    parser.add_argument("--sharding", default="none", help="none, zero1, zero2, zero3 or fsdp (default none)")
    parser.add_argument(
        "--no-reshard", action="store_true", help="FSDP2 keeps what it gathered from forward to backward"
    )
    parser.add_argument("--precision", help="fp32, bf16, fp16, bf16-mixed or fp16-mixed (default bf16)")
    compute = "FSDP2 computes in bfloat16 or float16 with float32 shards (MixedPrecisionPolicy)"
    parser.add_argument("--compute-dtype", metavar="DTYPE", help=compute)
    parser.add_argument("--master-weights", action="store_true", help="the optimizer keeps float32 copies")
    parser.add_argument("--attention", default="auto", help="auto (default: fused where the model can), sdpa or eager")
    parser.add_argument("--chunk-loss", action="store_true", help="logits and loss in chunks, as lowtide.fit does")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters on every linear layer")
    targets = "train adapters on the layers of these names alone, such as q_proj,v_proj"
    parser.add_argument("--lora-targets", default="", metavar="NAMES", help=targets)
    parser.add_argument("--lora-dropout", type=float, default=0.0, metavar="P", help="dropout before the adapters")
    parser.add_argument("--quantized", action="store_true", help="linear layers of 4 bits below the adapters (QLoRA)")
    selective = "layers are checkpoints that keep attention and every other matrix product (torchtitan's op)"
    parser.add_argument("--selective-op", action="store_true", help=f"{selective}; no plan is looked for")
    parser.add_argument("--offload-optimizer", action="store_true", help="the optimizer on the host")
    stepping = "each gradient is used and freed as soon as it is complete (LOMO): no clipping by the global norm"
    parser.add_argument("--optimizer-in-backward", action="store_true", help=stepping)
    parser.add_argument("--offload-activations", action="store_true", help="a plan may move activations to the host")
    parser.add_argument("--cuda-version", metavar="X.Y", help="whose context is counted (default: of 11.7 and later)")
    budget = 'of allocated memory: "auto" (default), "60GiB", "40%%" of the plain activations, or "none": no plan'
    parser.add_argument("--budget", default="auto", help=budget)
    parser.add_argument("--no-limits", action="store_true", help="do not look for the largest batch and sequence")
    parser.add_argument("--save", metavar="PLAN.json", type=Path, help="write the answer, for --check")
    parser.add_argument("--check", metavar="PLAN.json", type=Path, help="exit 1 if peak or time got worse than there")
    parser.add_argument("--tolerance", type=float, default=0.02, help="of --check: by more than this part (0.02)")


def add_setup_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that ``plan`` and ``advise`` share."""
    model = (
        "a shipped name, a config.json (transformers or diffusers), an id of the hub, timm/NAME, or "
        "SCRIPT.py:FUNCTION that returns (model, batch[, step])"
    )
    parser.add_argument("--model", required=True, metavar="NAME", help=model)
    parser.add_argument("--device", required=True, help='a name of the table such as h100, or "here"')
    parser.add_argument("--seq-len", type=int, help="tokens of each sequence (default 2048, or all positions)")
    parser.add_argument("--gpus", type=int, metavar="N", help="devices in all, of one machine")
    optimizers = (
        "adamw (default), adamw_fused, adamw_for_loop (foreach=False), adam, adamw_8bit, sgd, sgd_momentum, adafactor, "
        "muon or none"
    )
    parser.add_argument("--optimizer", default="adamw", help=optimizers)


def run(args: argparse.Namespace) -> tuple[int, str, dict[str, Any]]:
    """Exit code, text and JSON of the verb; 1 where it does not fit for sure, or got worse."""
    from lowtide.foresight import changes, check, limits
    from lowtide.foresight.forecast_json import as_json
    from lowtide.foresight.forecaster import Forecaster
    from lowtide.foresight.named_subjects import subject_named
    from lowtide.reports.worse import told

    setup, budget = _setup(args), _budget(args.budget)
    if setup.selective_op and budget not in (None, "auto"):
        raise BadUsageError(
            f"--budget {args.budget} asks for a plan, and --selective-op is one. Leave one of them out."
        )
    committed = None if args.check is None else check.read(args.check)
    if not 0 <= args.tolerance < 10:
        raise BadUsageError(f"--tolerance {args.tolerance} is no part. Pass 0.02 for 2 %.")
    subject = subject_named(args.model)
    setup = replace(setup, seq_len=subject.seq_len(args.seq_len))
    subject.check(setup)
    forecaster = Forecaster(subject)
    forecast = forecaster.forecast(setup, budget=budget)
    plain = budget is None
    body = {
        "status": "ok" if forecast.fits else "finding",
        "model": subject.name,
        "unit": subject.unit,
        "device": setup.device.name,
        **as_json(forecast, _parameters(subject, setup)),
        "max_batch_size": None,
        "max_seq_len": None,
        "changes": [],
    }
    if subject.has_sizes and not args.no_limits:
        body["max_batch_size"] = limits.max_batch_size(forecaster, setup, plain=plain)
        if subject.unit == "tokens":
            body["max_seq_len"] = limits.max_seq_len(forecaster, setup, plain=plain)
    found = [] if forecast.fits else changes.helpful_changes(forecaster, setup, trace=forecast.traced)
    body["changes"] = [_change_json(change) for change in found]
    text = _text(subject, forecast, body, found)
    code = 0 if forecast.fits else 1
    if committed is not None:
        worse = check.compare(committed, body, args.tolerance)
        body["check"] = {"tolerance": args.tolerance, "worse": [one.as_json() for one in worse]}
        text += "\n" + told(worse, args.check, args.tolerance)
        code = 1 if worse else 0
        body["status"] = "finding" if worse else "ok"
    if args.save is not None:
        write(args.save, lambda path: path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8"))
    return code, text, body


def _parameters(subject: Subject, setup: TrainingSetup) -> int:
    """Of the whole model."""
    whole = replace(setup, tensor_parallel=1, sequence_parallel=False, expert_parallel=1, pipeline_parallel=1)
    if whole.sharding != "none" and whole.data_parallel == 1:
        whole = replace(whole, sharding="none")
    return sum(p.elements for p in subject.facts(whole).parameters)


def _setup(args: argparse.Namespace) -> TrainingSetup:
    from lowtide.estimation.device_table import device_named
    from lowtide.foresight.training_setup import TrainingSetup, degrees

    found = degrees(args.gpus, args.data_parallel, args.tensor_parallel, args.pipeline_parallel)
    return TrainingSetup(
        device_named(args.device), seq_len=1 if args.seq_len is None else args.seq_len,
        batch_size=args.batch_size, accumulate=args.accumulate,
        optimizer=args.optimizer, precision=args.precision or ("fp32" if args.compute_dtype else "bf16"),
        compute_dtype=args.compute_dtype, master_weights=args.master_weights,
        attention=args.attention, chunk_loss=args.chunk_loss, lora_rank=args.lora, quantized=args.quantized,
        lora_targets=tuple(name.strip() for name in args.lora_targets.split(",") if name.strip()),
        lora_dropout=args.lora_dropout, selective_op=args.selective_op, cuda_version=args.cuda_version,
        sharding=args.sharding, reshard=not args.no_reshard, data_parallel=found.data, tensor_parallel=found.tensor,
        sequence_parallel=args.sequence_parallel, expert_parallel=args.expert_parallel,
        pipeline_parallel=found.pipeline,
        offload_optimizer=args.offload_optimizer, offload_activations=args.offload_activations,
        optimizer_in_backward=args.optimizer_in_backward,
    )  # fmt: skip


def _budget(text: str) -> int | str | None:
    from lowtide.units import parse_budget

    if text.strip().lower() == "none":
        return None
    return budget_of(text, partial(parse_budget, name="--budget"))


def _change_json(change: Change) -> dict[str, Any]:
    found = change.forecast
    return {
        "option": change.option,
        "meaning": change.meaning,
        "verdict": found.verdict,
        "peak_bytes": found.peak_bytes.expected,
        "step_ms": found.step_ms and found.step_ms.expected,
        "tokens_per_second": found.tokens_per_second,
    }


def _text(subject: Subject, forecast: Forecast, body: dict[str, Any], found: list[Change]) -> str:
    from lowtide.foresight.forecast_json import worst_rank
    from lowtide.units import format_bytes

    setup, peak = forecast.setup, forecast.peak_bytes
    size = subject.size_words(setup.batch_size, setup.seq_len)
    where = setup.device.title if setup.ranks == 1 else f"{setup.ranks} x {setup.device.title}"
    lines = [
        f"{subject.name} on {where}, {size}: {forecast.verdict}.",
        f"  peak       {format_bytes(peak.expected)} ({format_bytes(peak.low)} to {format_bytes(peak.high)}) of "
        f"{format_bytes(setup.device.usable_bytes)}",
    ]
    lines += [f"    {part:<14} {format_bytes(count)}" for part, count in forecast.by_part.items() if count]
    if setup.ranks > 1:
        lines.append(f"  worst rank {worst_rank(forecast)}")
    for number, stage in enumerate(forecast.stages):
        of = "layer" if stage.layers[0] == stage.layers[1] else "layers"
        numbers = " to ".join(str(n) for n in dict.fromkeys(stage.layers))
        lines.append(f"    stage {number:<8} {format_bytes(stage.peak_bytes.expected)}: {of} {numbers}, "
                     f"{stage.micro_batches} micro-batches at a time, {stage.verdict}")  # fmt: skip
    if forecast.host_bytes:
        lines.append(f"  host       {format_bytes(forecast.host_bytes)} for each rank")
    if forecast.step_ms is not None and forecast.plan is not None:
        counts = ", ".join(f"{action} {count}" for action, count in forecast.plan.counts.items() if count)
        lines += [
            f"  step       {_seconds(forecast.step_ms.expected)} ({_seconds(forecast.step_ms.low)} to "
            f"{_seconds(forecast.step_ms.high)}), {forecast.tokens_per_second:.0f} {subject.unit} a second",
            f"  plan       {counts}; {forecast.plan.predicted_overhead:+.1%} time over saving everything "
            f"({format_bytes(forecast.plan.plain_peak_bytes)})",
        ]
    if body["max_batch_size"] is not None:
        longest = "" if body["max_seq_len"] is None else f", or {setup.batch_size} x {body['max_seq_len']}"
        lines.append(f"  at most    {subject.size_words(body['max_batch_size'], setup.seq_len)}{longest}")
    if found:
        fitting = "What would fit:" if found[0].forecast.fits else "Nothing alone makes it fit. Nearest:"
        lines.append(fitting if forecast.traced else "Parameters and optimizer alone are too much. They would be:")
        for change in found:
            rate = change.forecast.tokens_per_second
            speed = f", {rate:.0f} {subject.unit} a second" if rate is not None else ""
            amount = format_bytes(change.forecast.peak_bytes.expected)
            lines.append(f"  {change.option:<30} {amount}{speed} ({change.meaning})")
    lines.append("Assumed: " + "; ".join(forecast.assumptions) + ".")
    return "\n".join(lines)


def _seconds(ms: float) -> str:
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1e3:.3g} s"
