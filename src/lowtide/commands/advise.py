"""``lowtide advise``: how to train a model on given devices, ranked by predicted tokens a second."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from lowtide.commands.plan import add_setup_arguments
from lowtide.commands.verbs import add_verb
from lowtide.scripts import BadUsageError

if TYPE_CHECKING:
    from lowtide.foresight.advice import Advice
    from lowtide.foresight.forecast import Forecast
    from lowtide.foresight.subjects import Subject
    from lowtide.foresight.training_setup import TrainingSetup


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs, "advise", run, "how to train a model on given devices, ranked by predicted tokens a second",
        epilog="example:\n  lowtide advise --model llama-3.1-8b --device h100 --gpus 8 --global-batch 64",
    )  # fmt: skip
    add_setup_arguments(parser)
    parser.add_argument("--global-batch", type=int, metavar="N", help="sequences of a step (default: one a device)")
    parser.add_argument("--precision", help="only this one: fp32, bf16, fp16, bf16-mixed or fp16-mixed")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters on every linear layer")
    parser.add_argument("--quantized", action="store_true", help="4-bit layers below the adapters")


def run(args: argparse.Namespace) -> tuple[int, str, dict[str, Any]]:
    """Exit code, text and JSON of the verb; 1 where nothing that was tried fits."""
    from lowtide.estimation.device_table import device_named
    from lowtide.foresight.advice import NOT_TRIED, advise
    from lowtide.foresight.forecaster import Forecaster
    from lowtide.foresight.named_subjects import subject_named
    from lowtide.foresight.training_setup import degrees
    from lowtide.reports.progress import counting

    device = device_named(args.device)
    gpus = degrees(args.gpus, None, None).data
    global_batch = gpus if args.global_batch is None else args.global_batch
    if global_batch < 1:
        raise BadUsageError(f"--global-batch {global_batch} is not positive. Pass 1 or more.")
    subject = subject_named(args.model)
    if not subject.has_sizes:
        raise BadUsageError(
            "advise chooses batch sizes, and a script has its own. Use: lowtide plan --model SCRIPT.py:F"
        )
    seq_len = subject.seq_len(args.seq_len)
    with counting("tracing") as progress:
        advice = advise(
            Forecaster(subject), device, seq_len=seq_len, gpus=gpus, global_batch=global_batch,
            optimizer=args.optimizer, precision=args.precision, lora_rank=args.lora, quantized=args.quantized,
            progress=progress,
        )  # fmt: skip
    body = {
        "status": "ok" if advice.ranked else "finding",
        "model": subject.name,
        "unit": subject.unit,
        "device": device.name,
        "gpus": gpus,
        "global_batch": global_batch,
        "tried": advice.tried,
        "not_tried": list(NOT_TRIED) if gpus > 1 else [],
        "candidates": [_json(forecast) for forecast in advice.ranked],
        "toggles": [{"option": t.option, "meaning": t.meaning, **_json(t.forecast)} for t in advice.toggles],
        "nearest": advice.nearest and _json(advice.nearest),
    }
    title = device.title if gpus == 1 else f"{gpus} x {device.title}"
    text = _text(subject, title, advice, global_batch, seq_len)
    if body["not_tried"]:
        text += f"\nNot tried: {', '.join(NOT_TRIED)}. Ask lowtide plan about them."
    return (0 if advice.ranked else 1), text, body


def _json(forecast: Forecast) -> dict[str, Any]:
    plan = forecast.plan
    return {
        "verdict": forecast.verdict,
        "tokens_per_second": forecast.tokens_per_second,
        "step_ms": forecast.step_ms and forecast.step_ms.expected,
        "peak_bytes": forecast.peak_bytes.expected,
        "host_bytes": forecast.host_bytes,
        "overhead": plan and plan.predicted_overhead,
        "plan": plan and plan.counts,
        "setup": forecast.setup.as_json,
    }


def _text(subject: Subject, title: str, advice: Advice, global_batch: int, seq_len: int) -> str:
    from lowtide.foresight.advice import RANKED
    from lowtide.units import format_bytes

    lines = [
        f"{subject.name} on {title}, {subject.size_words(global_batch, seq_len)} a step; {advice.tried} ways tried."
    ]
    if not advice.ranked:
        nearest = advice.nearest
        lines.append("None fits.")
        if nearest is not None:
            amount = format_bytes(nearest.peak_bytes.expected)
            lines.append(
                f"Nearest: {_words(nearest.setup)}, {amount} of {format_bytes(nearest.setup.device.usable_bytes)}"
            )
        lines += ["With one change more:"] if advice.toggles else []
        for change in advice.toggles:
            lines.append(_row(subject.unit, f"{change.option} ({change.forecast.verdict})", change.forecast))
        return "\n".join(lines)
    best = advice.ranked[0]
    for forecast in advice.ranked[:RANKED]:
        lines.append(_row(subject.unit, _words(forecast.setup), forecast))
    lines.append("From the first of these, one change at a time:")
    for change in advice.toggles:
        if change.forecast.tokens_per_second is None:
            lines.append(f"  {change.option:<34} {change.forecast.verdict}")
            continue
        ratio = change.forecast.tokens_per_second / (best.tokens_per_second or 1.0)
        amount = format_bytes(change.forecast.peak_bytes.expected)
        lines.append(f"  {change.option:<34} {ratio - 1:+6.1%} speed, {amount}, {change.forecast.verdict}")
    lines.append(f"Times may be off by {best.setup.device.error_fraction:.0%}: nothing was run on such a device.")
    return "\n".join(lines)


def _row(unit: str, words: str, forecast: Forecast) -> str:
    from lowtide.units import format_bytes

    overhead = "" if forecast.plan is None else f", recomputing {forecast.plan.predicted_overhead:+.1%}"
    rate = "" if forecast.tokens_per_second is None else f"{forecast.tokens_per_second:.0f} {unit} a second"
    return f"  {rate:>22}  {format_bytes(forecast.peak_bytes.expected):>10}  {words}{overhead}"


def _words(setup: TrainingSetup) -> str:
    parts = [setup.precision, f"micro-batch {setup.batch_size} x {setup.accumulate}"]
    if setup.data_parallel > 1:
        parts.append(f"{setup.data_parallel} ranks {'replicated' if setup.sharding == 'none' else setup.sharding}")
    if setup.tensor_parallel > 1:
        parts.append(f"tensor parallel {setup.tensor_parallel}")
    parts += [
        word
        for word, given in (("chunked loss", setup.chunk_loss), ("optimizer on the host", setup.offload_optimizer))
        if given
    ]
    return ", ".join(parts)
