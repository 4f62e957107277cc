"""``lowtide kv``: what a model's KV cache takes, and what fits beside the weights on a device."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lowtide.commands.verbs import add_verb
from lowtide.scripts import BadUsageError

if TYPE_CHECKING:
    from lowtide.estimation.device_table import Device
    from lowtide.inference.cache_plan import CachePlan

_DTYPES = ("bfloat16", "float16", "float32")
_CACHE_DTYPES = (*_DTYPES, "fp8", "int8", "int4", "int2")


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = add_verb(
        verbs, "kv", run, "what a model's KV cache takes, and what fits beside the weights on a device",
        epilog="example:\n  lowtide kv --model llama-3.1-8b --batch-size 32 --seq-len 2048 --device a100-80gb",
    )  # fmt: skip
    parser.add_argument("--model", required=True, metavar="NAME", help="a shipped name, a config.json or its directory")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences at a time (default 1)")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of each, prompt and answer (default 2048)")
    parser.add_argument("--device", required=True, help='a name of the table such as h100, or "here"')
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the weights (default bfloat16)")
    parser.add_argument("--cache-dtype", choices=_CACHE_DTYPES, help="of the cache (default: as the weights)")
    parser.add_argument("--source-len", type=int, help="tokens of the encoder's input, where there is an encoder")


def run(args: argparse.Namespace) -> tuple[int, str, dict[str, Any]]:
    """Exit code, text and JSON of the verb; 1 where the cache does not fit."""
    from lowtide.estimation.device_table import device_named
    from lowtide.inference.cache_plan import config_of, count_parameters, plan_cache
    from lowtide.models.shipped import model_facts

    for option in ("batch_size", "seq_len", "source_len"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise BadUsageError(f"--{option.replace('_', '-')} {value} is not positive. Pass 1 or more.")
    device, facts = device_named(args.device), model_facts(args.model)
    config = config_of(facts)
    parameters = facts["parameters"] or count_parameters(config)
    plan = plan_cache(
        config, parameters, device, batch_size=args.batch_size, seq_len=args.seq_len, dtype=args.dtype,
        cache_dtype=args.cache_dtype, source_length=args.source_len,
    )  # fmt: skip
    body = {
        "status": "ok" if plan.fits else "finding",
        "model": facts["name"],
        "parameters": parameters,
        "device": device.name,
        "dtype": args.dtype,
        "cache_dtype": args.cache_dtype or args.dtype,
        **asdict(plan),
    }
    return (0 if plan.fits else 1), _text(facts["name"], device, plan), body


def _text(name: str, device: Device, plan: CachePlan) -> str:
    from lowtide.units import format_bytes

    size = f"{plan.batch_size} x {plan.seq_len} tokens"
    lines = [
        f"{name} on {device.title}: {size} {'fit' if plan.fits else 'do not fit'}.",
        f"  cache      {format_bytes(plan.cache_bytes)} ({format_bytes(plan.token_bytes)} for each token)",
        f"  weights    {format_bytes(plan.weights_bytes)}",
        f"  work       {format_bytes(plan.working_bytes)} for activations, {format_bytes(plan.context_bytes)} context",
        f"  device     {format_bytes(plan.usable_bytes)}",
        f"  at most    {plan.max_batch_size} sequences of {plan.seq_len} tokens, or {plan.batch_size} of "
        f"{plan.max_seq_len}",
    ]
    for server, settings in plan.settings.items():
        lines.append(f"  {server}: " + " ".join(f"{key}={value}" for key, value in settings.items()))
    return "\n".join(lines)
