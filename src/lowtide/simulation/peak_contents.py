"""What memory holds when a simulated step first reaches its peak."""

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.graph.step_graph import RUN, StepGraph
from lowtide.plan import Moves
from lowtide.simulation.references import References
from lowtide.simulation.simulated_step import SimulatedStep
from lowtide.simulation.simulator import Timeline


@dataclass(frozen=True)
class PeakContents:
    """The storages alive at the first moment of the peak.

    Attributes:
        event: Index into ``StepGraph.events``.
        op: The op that runs then, or ran last; None at the start of the step.
        replay: Whether that op is replayed in backward.
        originals: Bytes by storage, of what first runs made.
        replayed: Bytes by storage, of what replays and fetches made.
        peak_bytes: All of these, what was there before the step, workspace and generator state.
    """

    event: int
    op: int | None
    replay: bool
    originals: dict[int, int]
    replayed: dict[int, int]
    peak_bytes: int


def contents_at_peak(
    graph: StepGraph,
    actions: Mapping[int, str],
    replays: Mapping[int, int] | None,
    timeline: Timeline,
    moves: Moves | None = None,
) -> PeakContents:
    """What fills memory at the first moment of the peak.

    Args:
        timeline: What ``simulate_actions`` returns for the other arguments.
    """
    peak_bytes, event = timeline.peak_bytes, timeline.peak_event
    found: list[tuple[dict[int, int], dict[int, int]]] = []

    def probe(references: References, live_bytes: int, replayed_op: int | None) -> None:
        if live_bytes == peak_bytes and not found:
            found.append(_alive(references, replayed_op))

    step = SimulatedStep(graph, actions, replays or {}, moves or Moves(), probe)
    step.play(graph.events[: event + 1])
    originals, replayed = found[0] if found else _alive(step.references)  # an event without any op has no such moment
    replayed_ops = [r.op for r in timeline.replays if r.event == event and r.peak_bytes == peak_bytes]
    runs = [number for kind, number in graph.events[: event + 1] if kind == RUN]
    op = replayed_ops[0] if replayed_ops else runs[-1] if runs else None
    return PeakContents(event, op, bool(replayed_ops), originals, replayed, peak_bytes)


def _alive(references: References, replayed_op: int | None = None) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes by storage: of originals, and of what replays and fetches made, outputs of ``replayed_op`` included."""
    size, maker = references.index.bytes, references.index.maker
    originals = {s: size[s] for s, count in enumerate(references.counts) if count > 0 and maker[s] >= 0}
    replayed = {s: size[s] for s in sorted(references.materialised)}
    for s in () if replayed_op is None else references.index.makes_again[replayed_op]:
        replayed[s] = replayed.get(s, 0) + size[s]  # a transient result is there already
    return originals, replayed
