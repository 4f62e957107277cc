"""What came of a script on a GPU that is not there: does it fit, what did its steps take, where did it break."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowtide.pretending.command_run import CommandRun
from lowtide.pretending.environments import ScriptEnvironment
from lowtide.pretending.outcome_facts import KINDS, OutOfMemory, PretendFacts, StepPeak
from lowtide.pretending.outcome_page import fragment
from lowtide.pretending.outcome_text import text
from lowtide.pretending.settings import NCCL_BYTES, SKIPPED_ABOVE_BYTES, VERSIONS_DIFFER, PretendSettings, measured
from lowtide.pretending.step_record import step_record
from lowtide.pretending.step_time import StepTime, step_time
from lowtide.units import format_bytes

_TIGHT = 0.97
_GPU = Path("/dev/nvidiactl")
_MOST_STOPS = 10
# The choice of attention (``ATen/native/transformers/cuda/sdp_utils.cpp``) puts cuDNN's before FlashAttention on these,
# seen with PyTorch 2.11 on an H200; not in 2.9.
_CUDNN_ATTENTION = (9.0, 10.0)
_CUDNN_ATTENTION_SINCE = (2, 11)
_NETWORK = re.compile(
    r"Name or service not known|Temporary failure in name resolution|couldn't connect to|ConnectionError|"
    r"LocalEntryNotFoundError|OfflineModeIsEnabled|Network is unreachable"
)
_COMPILING = re.compile(r"\bnvcc\b|CUDA_HOME|Error building extension")


class PretendReport(PretendFacts):
    """What ``lowtide pretend`` found; ``str()`` is the report, and a notebook shows it with its picture."""

    def __str__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        return fragment(self)


def outcome(run: CommandRun, settings: PretendSettings, environment: ScriptEnvironment, capacity: int) -> PretendReport:
    """Put together what one run of the command has shown.

    Args:
        capacity: Bytes of the device.
    """
    seen = run.seen
    ranks = seen.get("ranks", settings.ranks or 1)
    context = settings.context_bytes(ranks)
    steps = tuple(
        StepPeak(
            step["allocated_bytes"], step["reserved_bytes"], step["seconds"] * 1e3, step["launches"], step["waits"]
        )
        for step in seen.get("steps", ())
    )
    after = seen.get("after_last_step", {"allocated_bytes": 0, "reserved_bytes": 0})
    first = _out_of_memory(run)
    verdict = _verdict(run, steps, first)
    allocated = max([after["allocated_bytes"], *(step.allocated_bytes for step in steps)])
    reserved = max([after["reserved_bytes"], *(step.reserved_bytes for step in steps)])
    if verdict == "fits" and reserved > _TIGHT * (capacity - context):
        verdict = "fits tightly"
    return PretendReport(
        command=run.command,
        device=settings.facts.name,
        torch=environment.torch,
        capacity_bytes=capacity,
        context_bytes=context,
        ranks=ranks,
        rank=seen.get("rank", settings.rank),
        fits=verdict.startswith("fits"),
        verdict=verdict,
        exit_code=run.exit_code,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        steps=steps,
        by_kind=seen.get("by_kind", dict.fromkeys(KINDS, 0)),
        by_part=tuple(seen.get("by_part", ())),
        by_module=tuple(seen.get("by_module", ())),
        by_line=tuple(seen.get("by_line", ())),
        curve=seen.get("curve", {}),
        peak_at=seen.get("peak_at"),
        out_of_memory=first,
        stops=tuple(seen.get("stops", ())[:_MOST_STOPS]),
        stages=tuple(seen.get("stages", ())),
        snapshot=seen.get("snapshot"),
        time=_time(run, settings),
        lowtide=seen.get("lowtide"),
        changes=(),
        host_peak_bytes=run.host_peak_bytes,
        pinned_peak_bytes=seen.get("pinned_peak_bytes", 0),
        compile_s=seen.get("compile_seconds", 0.0),
        seconds=run.seconds,
        last_words=run.last_words,
        assumptions=tuple(_assumptions(settings, environment, seen, run.step_record)),
        notes=tuple(_notes(run, steps, first, settings.time)),
    )


def _time(run: CommandRun, settings: PretendSettings) -> StepTime | None:
    if run.step_record is None:
        return None
    return step_time(
        step_record(run.step_record, run.seen["step_record"]),
        settings.facts,
        tokens=settings.tokens,
        anchor=measured(settings.measured) if settings.measured is not None else None,
        network_bits_per_s=settings.network_gbit * 1e9 if settings.network_gbit is not None else None,
    )


def _out_of_memory(run: CommandRun) -> OutOfMemory | None:
    """The last one is the one that ended the script; where the script went on, the first says when it began."""
    found: Sequence[dict[str, Any]] = run.seen.get("out_of_memory", ())
    if not found:
        return None
    ended = run.exit_code != 0
    told = found[-1] if ended else found[0]
    message = told["message"] or next(
        (line.strip() for line in reversed(run.last_words.splitlines()) if "CUDA out of memory" in line), ""
    )
    keys = ("step", "asked_bytes", "allocated_bytes", "reserved_bytes")
    line = told["script_line"] or told["line"]
    return OutOfMemory(
        **{key: told[key] for key in keys}, line=line, inner_line=told["line"], message=message, was_caught=not ended
    )


def _verdict(run: CommandRun, steps: tuple[StepPeak, ...], first: OutOfMemory | None) -> str:
    if run.ended_because:
        return "did not end"
    if run.exit_code:
        # An error of memory that was caught before is not what ended it.
        error = run.seen.get("error", "out of memory")
        return "does not fit" if first is not None and "out of memory" in error else "failed"
    return "fits" if steps else "trained nothing"


def _assumptions(
    settings: PretendSettings, environment: ScriptEnvironment, seen: dict[str, Any], record: dict[str, Any] | None
) -> list[str]:
    context = format_bytes(settings.facts.context_bytes)
    found = [f"PyTorch {environment.torch}: another version may take up to {VERSIONS_DIFFER:.0%} more or less."]
    ranks = seen.get("ranks", settings.ranks or 1)
    if ranks > 1:
        found.append(f"The driver's context takes {context}, NCCL's buffers {format_bytes(NCCL_BYTES)}.")
    else:
        found.append(f"The driver's context takes {context} of the device.")
    if _GPU.exists():
        found.append("This machine has a GPU: the script did not see it.")
    if ranks > 1:
        found.append(
            f"Rank {seen.get('rank', settings.rank)} of {ranks} ran; every other rank is taken to hold what it holds."
        )
    if settings.values == "small":
        limit = format_bytes(SKIPPED_ABOVE_BYTES)
        found.append(f"Operators on more than {limit} of numbers gave zeros: losses and norms mean nothing.")
        found.append("What depends on such values is not the real run's: loads of experts, lengths of generated text.")
    elif settings.values == "none":
        found.append("No operator gave values.")
    found.append("cuDNN is off: convolutions run on PyTorch's own kernels, without cuDNN's workspaces.")
    version = tuple(int(part) for part in environment.torch.split(".")[:2])
    is_flash = record is None or any("flash_attention" in told["op"] for told in record["signatures"])
    if is_flash and settings.facts.compute_capability in _CUDNN_ATTENTION and version >= _CUDNN_ATTENTION_SINCE:
        found.append("Attention ran as FlashAttention; a real one takes cuDNN's, whose workspaces differ by some MiB.")
    if record is not None:
        found.append("Time: the host is as fast as this one; no data is waited for, and no other rank is late.")
    if settings.last_step:
        found.append(f"{settings.last_step} optimizer steps ran: fragmentation after thousands is not seen.")
    return found


def _notes(run: CommandRun, steps: tuple[StepPeak, ...], first: OutOfMemory | None, wants_time: bool) -> list[str]:
    found = list(run.seen.get("notes", ()))
    if run.ended_because:
        reached = (run.seen.get("stages") or [{"stage": "its start, before torch was imported"}])[-1]["stage"]
        found.append(f"The command was ended because {run.ended_because}; it had reached {reached}.")
    elif not steps and not run.exit_code:
        found.append("The command ended without an optimizer step on the device.")
        if any(stage["stage"] == "backward" for stage in run.seen.get("stages", ())):
            found.append("Backward ran: what changes weights without an optimizer of PyTorch's is not seen as a step.")
    if first is not None and first.was_caught:
        found.append("The script caught an out-of-memory error and went on.")
    if run.exit_code and first is None and _NETWORK.search(run.last_words):
        found.append("The script asked for something from the network. Give it local folders and data.")
    if run.exit_code and _COMPILING.search(run.last_words):
        found.append("The script compiles CUDA code when it runs, with nvcc: what that makes cannot run here.")
    if run.seen.get("counted") and run.step_record is None and "step_record" not in run.seen and wants_time:
        found.append("The script ended before a step was recorded for its time: let it take three steps more.")
    left_out = run.seen.get("without_values", {})
    for name, (calls, why) in list(left_out.items())[:5]:
        found.append(f"No values for {name} ({calls} calls): {why[:120]}")
    asked = [name for name in run.seen.get("unsupported", ()) if not name.startswith(("cuLogs", "cudnnGetVersion"))]
    others = run.seen.get("foreign_libraries", ())
    if others:
        found.append(f"Kernels of {', '.join(others[:6])} ran as nothing: their results are zeros or what was there.")
    if asked:
        found.append(f"CUDA functions that are not there were called: {', '.join(asked[:6])}.")
    return found
