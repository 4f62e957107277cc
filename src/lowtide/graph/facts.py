"""When everything in a step happens, read off its events once: what solvers, the simulator and reports look up.

Every moment is an *event index*, an index into ``StepGraph.events``. What never happens is absent.
"""

from collections import Counter, deque
from dataclasses import dataclass

from lowtide.graph.memo import once_per_graph
from lowtide.graph.step_graph import DROP, FREE, PACK, RELEASE, RUN, UNPACK, StepGraph


@dataclass(frozen=True)
class StepFacts:
    """Event indices of one step.

    Attributes:
        run_event: When each op runs.
        birth: When each storage is made, by storage; those that were there before the step are absent.
        death: When Python drops each storage, by storage; autograd may hold it longer.
        packed: When autograd stores each saved tensor, by saved id.
        released: When autograd lets go of each saved tensor, by saved id.
        unpack_spans: From each unpack to its drop, by saved id; without a drop, to the end of the step.
        unpack_events: All unpacks, in order.
        first_pack: When autograd first stores each storage, by storage.
        first_use: When backward first asks for each storage, by storage. Its keys are what backward asks for.
        last_reference: The last release or drop of a saved tensor on each storage, by storage.
        references: All frees, packs, unpacks, drops and releases of each storage, in order, by storage.
        backward_start: The first unpack or backward op; the number of events where there is neither.
        first_backward_run: The first backward op; the number of events where there is none.
        completed_by: The op that finishes another's output in place, by the op that is finished.
        readers: Forward ops that read each storage, in program order, by storage.
    """

    run_event: dict[int, int]
    birth: dict[int, int]
    death: dict[int, int]
    packed: dict[int, int]
    released: dict[int, int]
    unpack_spans: dict[int, list[tuple[int, int]]]
    unpack_events: list[int]
    first_pack: dict[int, int]
    first_use: dict[int, int]
    last_reference: dict[int, int]
    references: dict[int, list[int]]
    backward_start: int
    first_backward_run: int
    completed_by: dict[int, int]
    readers: dict[int, list[int]]


@once_per_graph
def step_facts(graph: StepGraph) -> StepFacts:
    """The facts of ``graph``."""
    end = len(graph.events)
    backward_runs = (at for at, (kind, number) in enumerate(graph.events) if kind == RUN and graph.ops[number].backward)
    first_backward_run = next(backward_runs, end)
    facts = StepFacts(
        run_event={}, birth={}, death={}, packed={}, released={}, unpack_spans={}, unpack_events=[], first_pack={},
        first_use={}, last_reference={}, references={},
        backward_start=min([first_backward_run, *(at for at, (kind, _) in enumerate(graph.events) if kind == UNPACK)]),
        first_backward_run=first_backward_run,
        completed_by={op.completes_inplace: op.id for op in graph.ops if op.completes_inplace is not None},
        readers={},
    )  # fmt: skip
    for op in graph.forward_ops:
        for storage in dict.fromkeys(op.reads):
            facts.readers.setdefault(storage, []).append(op.id)
    open_unpacks: dict[int, deque[int]] = {}
    for at, (kind, number) in enumerate(graph.events):
        if kind == RUN:
            facts.run_event[number] = at
            facts.birth.update(dict.fromkeys(graph.ops[number].makes, at))
            continue
        storage = number if kind == FREE else graph.saved[number]
        facts.references.setdefault(storage, []).append(at)
        if kind == FREE:
            facts.death[storage] = at
        elif kind == PACK:
            facts.packed[number] = at
            facts.first_pack.setdefault(storage, at)
        elif kind == UNPACK:
            facts.unpack_events.append(at)
            facts.first_use.setdefault(storage, at)
            open_unpacks.setdefault(number, deque()).append(at)
        elif kind == DROP:
            facts.last_reference[storage] = at
            facts.unpack_spans.setdefault(number, []).append((open_unpacks[number].popleft(), at))
        elif kind == RELEASE:
            facts.last_reference[storage] = at
            facts.released[number] = at
    for number, unpacks in open_unpacks.items():
        for at in unpacks:
            facts.unpack_spans.setdefault(number, []).append((at, end))
    return facts


@once_per_graph
def passes(graph: StepGraph) -> int:
    """How many backward passes ask for the same saved tensor: more than one where graphs are retained."""
    if not graph.retained_backwards:  # a backward may also ask for it more than once
        return 1
    return max(Counter(number for kind, number in graph.events if kind == UNPACK).values(), default=1)
