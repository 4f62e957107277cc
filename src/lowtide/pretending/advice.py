"""What would make a script fit, each change measured by running the script again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO

from lowtide.pretending import command_run
from lowtide.pretending.command_run import CommandRun, SentObjects
from lowtide.pretending.environments import ScriptEnvironment
from lowtide.pretending.outcome import PretendReport, outcome
from lowtide.pretending.outcome_facts import MeasuredChange
from lowtide.pretending.rank_runs import RankRuns
from lowtide.pretending.settings import PretendSettings
from lowtide.pretending.standin_package import memory_of, standin_gpus
from lowtide.units import format_bytes

_ENDLESS = 1 << 40  # more than any device has: the run shows what it needs
# --batch-size 8, --per_device_train_batch_size=8, batch_size=8
_BATCH = re.compile(r"^(-{0,2}(?:[\w.]*[._-])?(?:train[._-])?(?:micro[._-])?batch[._-]size)(=?)(\d*)$")
_ACCUMULATE = re.compile(
    r"^(-{0,2}(?:[\w.]*[._-])?(?:gradient[._-]accumulation[._-]steps|grad[._-]accum\w*|accumulate))(=?)(\d*)$"
)


@dataclass(frozen=True)
class _Variant:
    change: str
    how: str
    settings: PretendSettings
    command: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    inside: str = ""  # of change_inside.py: it counts where it was made


def advise(
    report: PretendReport, settings: PretendSettings, environment: ScriptEnvironment, output: IO[str] | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> tuple[MeasuredChange, ...]:  # fmt: skip
    """Run the script again with each change that can be made from outside, the cheapest to take first.

    Args:
        report: Of the run as it is.
        say: Is told each change before it runs.
    """
    # What was measured is of the script as it is; it says how fast the device is for its changes.
    speed = f"speed {report.time.speed}" if report.time is not None and report.time.is_anchored else None
    settings = replace(settings, measured=speed, clock=False)
    found = [_need(report, settings, environment, output, say)]
    for variant in _variants(report, settings):
        say(f"running again: {variant.change}")
        made = _measured(variant, settings, environment, output)
        if made is not None:
            found.append(made)
    return tuple(found)


def _measured(
    variant: _Variant, settings: PretendSettings, environment: ScriptEnvironment, output: IO[str] | None
) -> MeasuredChange | None:
    """None: the change could not be made in this script."""
    run = _run(variant, environment, output)
    how = " and ".join(run.seen.get("changes", ())) if variant.inside else variant.how
    if not how:
        return None
    capacity = settings.memory_bytes or memory_of(settings.facts.name)
    found = outcome(run, variant.settings, environment, capacity)
    last = found.steps[-1] if found.steps else None
    if found.lowtide is not None and not found.lowtide["in_force"]:
        how += ": " + (found.lowtide["reasons"] or ["no plan was in force"])[-1].splitlines()[0]
    return MeasuredChange(
        variant.change, how, found.fits, found.peak_reserved_bytes if last else None, last.launches if last else None,
        _step_ms(found),
    )  # fmt: skip


def _run(variant: _Variant, environment: ScriptEnvironment, output: IO[str] | None) -> CommandRun:
    def of_rank(settings: PretendSettings, sent: SentObjects) -> CommandRun:
        variables = dict(variant.variables)
        return command_run.run(variant.command, settings, environment, output, variables, variant.inside, sent=sent)

    with RankRuns(of_rank) as runs:
        return runs.of(variant.settings)


def _need(
    report: PretendReport, settings: PretendSettings, environment: ScriptEnvironment, output: IO[str] | None,
    say: Callable[[str], object],
) -> MeasuredChange:  # fmt: skip
    """What the script takes where memory has no end, and the smallest device that has it."""
    if report.fits:
        needed, launches, step_ms = report.peak_reserved_bytes, report.steps[-1].launches, _step_ms(report)
    else:
        say("running again: on a device without an end, to see what it needs")
        endless = _Variant("", "", replace(settings, memory_bytes=_ENDLESS), report.command)
        run = _run(endless, environment, output)
        found = outcome(run, settings, environment, _ENDLESS)
        needed, launches = found.peak_reserved_bytes, found.steps[-1].launches if found.steps else 0
        step_ms = _step_ms(found)
    devices = sorted(standin_gpus(), key=memory_of)
    enough = next((d for d in devices if memory_of(d) >= needed + report.context_bytes), None)
    device = f"--device {enough}" if enough else "no single device has it"
    title = f"a device with {format_bytes(needed + report.context_bytes)}"
    return MeasuredChange(title, device, report.fits, needed or None, launches or None, step_ms)


def _step_ms(report: PretendReport) -> float | None:
    return report.time.step_ms if report.time is not None else None


def _variants(report: PretendReport, settings: PretendSettings) -> Iterator[_Variant]:
    command = report.command
    segments = (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)
    yield _Variant(
        "segments that grow", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", settings, command, segments
    )
    if settings.budget is None:
        yield _Variant("lowtide", "--budget auto", replace(settings, budget="auto"), command)
    yield _Variant("gradient checkpointing", "", settings, command, inside="checkpointing")
    yield _Variant("a loss in chunks", "", settings, command, inside="chunked-loss")
    yield _Variant("states of Adam in 8 bits", "", settings, command, inside="8-bit")
    yield _Variant("these three", "", settings, command, inside="checkpointing,chunked-loss,8-bit")
    smaller = half_the_batch(command)
    if smaller is not None:
        yield _Variant("half the batch", " ".join(w for w in smaller if w not in command), settings, smaller)
    if report.ranks > 1:
        more = replace(settings, ranks=2 * report.ranks)
        yield _Variant("twice the ranks", f"--ranks {more.ranks}", more, command)


def half_the_batch(command: Sequence[str]) -> tuple[str, ...] | None:
    """The command with half the batch and twice the accumulation, where it says them as numbers; else None."""
    words, changed = list(command), False
    for pattern, factor in ((_BATCH, 0.5), (_ACCUMULATE, 2.0)):
        for position, word in enumerate(words):
            match = pattern.match(word)
            if match is None:
                continue
            name, equals, number = match.groups()
            if equals and number:
                value, place, form = int(number), position, f"{name}={{}}"
            elif not equals and not number and position + 1 < len(words) and words[position + 1].isdecimal():
                value, place, form = int(words[position + 1]), position + 1, "{}"
            else:
                continue
            if pattern is _BATCH and value < 2:
                continue
            words[place] = form.format(int(value * factor))
            changed |= pattern is _BATCH
    return tuple(words) if changed else None
