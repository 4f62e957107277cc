"""The step that a pretended run recorded: what the host asked of the device, in its order (plain data).

``cuda_standin/csrc/runtime/step_record.h`` says what the numbers of an entry are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

KINDS = ("op", "kernel", "to_device", "to_host", "on_device", "fill", "event", "wait", "host_event", "host_stream",
         "host_device", "collective", "replay")  # fmt: skip


class Entry(NamedTuple):
    """One thing that the host asked for.

    Attributes:
        at_ns: The host's clock since the step began, without the stand-in's own work.
        stream: 0 is the default one.
        a, b, c, d, e: By kind. ``op``: signature, bytes written, kernels, whether backward's thread called it.
            ``kernel``: signature or -1. Copies: bytes, whether pinned. ``fill``: bytes. ``event``, ``wait``,
            ``host_event``: which. ``collective``: signature, bytes of one rank's part, communicator, group of calls.
            ``replay``: which graph.
    """

    kind: str
    at_ns: int
    stream: int
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    e: int = 0


@dataclass(frozen=True)
class StepRecord:
    """One step.

    Attributes:
        signatures: What operators, kernels and collectives are, by number: ``lowtide.measurement.op_inputs``.
        graphs: What went into the CUDA graphs that the step replays.
        took_ns: The host's time of this step; ``host_ns``: of one that was not recorded.
        tf32: Matrix products may round float32.
    """

    entries: tuple[Entry, ...]
    signatures: tuple[dict[str, Any], ...]
    graphs: dict[int, tuple[Entry, ...]]
    took_ns: int
    host_ns: int
    tf32: bool = False


def step_record(body: Mapping[str, Any], facts: Mapping[str, Any]) -> StepRecord:
    """From the file that the stand-in wrote, and what the script's process reported beside it."""
    return StepRecord(
        entries=tuple(Entry(*entry) for entry in body["entries"]),
        signatures=tuple(body["signatures"]),
        graphs={int(number): tuple(Entry(*entry) for entry in found) for number, found in body["graphs"].items()},
        took_ns=body["took_ns"],
        host_ns=min(facts["host_ns"]),
        tf32=facts["tf32"],
    )
