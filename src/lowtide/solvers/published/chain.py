"""A step as a chain of stages, for the methods that were published for chains.

The symbols are those of Beaumont et al. 2019 (https://hal.inria.fr/hal-02352969), which every method here shares:

    a^k      what stage k hands to stage k + 1              Stage.output_bytes
    ā^k      all that the backward of stage k needs of it,  Stage.saved_bytes
             a^k included; its input a^(k-1) is not
    δ^k      gradient of a^k                                Stage.gradient_bytes
    u_f, u_b times of forward and backward                  Stage.forward_ms, Stage.backward_ms
    o_f, o_b memory that comes and goes meanwhile           Stage.*_overhead_bytes
    F_∅ F_ck F_all B                                        EMPTY, CK, ALL, BACKWARD

A *schedule* is a list of such steps. What a storage's action is, and how often its op runs again, follows from it
(``StepChain.carry_out``).

Differs from the papers: a^k may be several storages; what skips a stage (a mask, rotary tables, an encoder's output)
or may not be recomputed is kept in every plan and belongs to no stage; within a stage the tape replays only the ops
that the purpose of the run needs, each when it is first asked for, so that a schedule's own time is an upper bound.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from lowtide.graph.facts import step_facts
from lowtide.graph.step_graph import PACK, RUN, UNPACK, StepGraph
from lowtide.plan import RECOMPUTE
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.graph_queries import (
    complete_actions,
    read_by_forward,
    recomputable,
    repeated_layers,
    stored_at_backward_start,
)
from lowtide.solvers.published.lazy_candidates import LazyCandidate, ops_that_make, planned_ms
from lowtide.solvers.search_context import SearchContext

EMPTY = "F_empty"  # run a stage for its output alone, and let its input go
CK = "F_ck"  # run a stage for its output alone; its input stays
ALL = "F_all"  # run a stage and keep all that its backward needs
BACKWARD = "B"


class Step(NamedTuple):
    """One step of a schedule: ``kind`` (``EMPTY``, ``CK``, ``ALL`` or ``BACKWARD``) of one stage, from 0."""

    kind: str
    stage: int


@dataclass(frozen=True)
class Stage:
    """What one stage of a chain costs.

    Attributes:
        run_overhead_bytes: Peak of a run for the output alone, beyond its input and output (o_f of F_∅ and F_ck).
        save_overhead_bytes: Peak of a run that keeps everything, beyond its input and ``saved_bytes`` (o_f of F_all).
        backward_overhead_bytes: Peak of backward beyond input, ``saved_bytes`` and ``gradient_bytes``.
    """

    forward_ms: float
    backward_ms: float
    output_bytes: int
    saved_bytes: int
    gradient_bytes: int = 0
    run_overhead_bytes: int = 0
    save_overhead_bytes: int = 0
    backward_overhead_bytes: int = 0


class _Work(NamedTuple):
    """Ops of a stage that run again for its output, and for its backward."""

    for_output: frozenset[int]
    for_backward: frozenset[int]


class _Runs(NamedTuple):
    """How often a stage runs again: for its output alone, for its backward alone, and for both."""

    through: int
    inner: int
    both: int


class _Parsed(NamedTuple):
    """Stages that the forward pass saves, stages whose output it keeps, and how often each stage runs again."""

    saved: set[int]
    checkpoints: set[int]
    runs: list[_Runs]


class StepChain:
    """A step graph as a chain.

    Stages follow program order: what runs before the first repeated layer (if anything does), one stage a layer, what
    runs after the last one. An op between two layers belongs to the earlier.

    Attributes:
        stage_of: Stage of each forward op.
        layers: Stages that are repeated layers; the others are head and tail.
        made: Storages that each stage makes.
        outputs: For each stage the storages that it hands to the next stage, and to no later one.
        kept: What may not be recomputed, or skips a stage.

    Raises:
        ValueError: no layer repeats.
    """

    def __init__(self, context: SearchContext, method: str) -> None:
        graph = context.graph
        layer_of = repeated_layers(graph, method)
        first, last = min(layer_of), max(layer_of)
        head = int(any(op.id < first for op in graph.forward_ops))
        stage_of: dict[int, int] = {}
        latest = 0
        for op in graph.forward_ops:
            latest = max(latest, layer_of.get(op.id, 0))
            stage_of[op.id] = 0 if op.id < first else head + latest + (op.id > last)
        count = max(stage_of.values()) + 1
        made: list[set[int]] = [set() for _ in range(count)]
        outputs: list[set[int]] = [set() for _ in range(count)]
        for op in graph.forward_ops:
            made[stage_of[op.id]].update(op.makes)
        kept = set().union(*made) - recomputable(graph)
        for storage, ops in read_by_forward(graph).items():
            maker = graph.storages[storage].op
            if maker not in stage_of or storage in kept:  # from before the step: no decision
                continue
            furthest = max(stage_of[op] for op in ops)
            if furthest > stage_of[maker] + 1:
                kept.add(storage)
            elif furthest > stage_of[maker]:
                outputs[stage_of[maker]].add(storage)
        self.context, self.graph = context, graph
        self.stage_of, self.layers = stage_of, range(head, head + latest + 1)
        self.made, self.outputs = tuple(map(frozenset, made)), tuple(map(frozenset, outputs))
        self.kept = frozenset(kept)
        self._known_work: dict[tuple[int, bool], _Work] = {}

    def stages(self) -> tuple[Stage, ...]:
        """Times and bytes of each stage, read off the plain step.

        - u_f and u_b are the times of the stage's ops. Backward ops belong to the stage whose forward stored what was
          unpacked last.
        - ā^k is what autograd stores of what the stage makes, and a^k.
        - δ^k is what backward has made and still holds when it enters the stage.
        - The overheads of F_all and B are peaks of the plain step within the stage, less what it starts with and, for
          F_all, what it keeps; that of F_∅ and F_ck is the peak when each value goes with its last reader.
        """
        graph, line = self.graph, self.context.plain.timeline
        before = (graph.start_bytes, *line.live_bytes)  # live bytes before each event
        forward, backward = self._events()
        gradients = _backward_bytes(graph)
        found = []
        for k in range(len(self.outputs)):
            sizes = {s: graph.storages[s].bytes for s in self.made[k]}
            saved = sum(size for s, size in sizes.items() if s in (graph.stored | self.outputs[k]) - self.kept)
            stays = sum(size for s, size in sizes.items() if s in self.kept)
            saving = max((line.event_peak_bytes[e] for e in forward[k]), default=0)
            undoing = max((line.event_peak_bytes[e] for e in backward[k]), default=0)
            output = sum(sizes[s] for s in self.outputs[k])
            found.append(
                Stage(
                    forward_ms=self._ms(forward[k]),
                    backward_ms=self._ms(backward[k]),
                    output_bytes=output,
                    saved_bytes=saved,
                    gradient_bytes=gradients[backward[k][0]] if backward[k] else 0,
                    run_overhead_bytes=max(self._run_peak(k) - output, 0),
                    save_overhead_bytes=max(saving - before[forward[k][0]] - saved - stays, 0),
                    backward_overhead_bytes=max(undoing - before[backward[k][0]], 0) if backward[k] else 0,
                )
            )
        return tuple(found)

    def lazy_candidate(self, schedule: Sequence[Step]) -> LazyCandidate:
        """``schedule`` with its time and floor as sums over stages; its actions are worked out on demand."""
        parsed = _parse(schedule)
        floor_bytes = self.graph.start_bytes + sum(
            self.graph.storages[s].bytes for s in stored_at_backward_start(self.graph)
        )
        for k, (inside, output) in enumerate(self._floors):
            if k not in parsed.saved:
                floor_bytes -= inside + (0 if k in parsed.checkpoints else output)
        often, costs = self._often(parsed), self.context.costs
        replay_ms = sum(count * (costs.op_ms[op] + costs.replay_us / 1e3) for op, count in often.items())
        step_ms = planned_ms(self.context, replay_ms, len(often))
        return LazyCandidate(step_ms, floor_bytes, lambda: self.carry_out(schedule))

    def carry_out(self, schedule: Sequence[Step]) -> Candidate:
        """``schedule`` as actions and replay counts.

        Steps before the first ``BACKWARD`` are the forward pass itself: they decide what is saved. Later ones are
        replays. A storage is replayed once for each run of its stage that needs it. After the last replay it stays
        until nothing needs it any more, which suits schedules that keep each checkpoint until it is used.
        """
        parsed = _parse(schedule)
        kept = self.kept.union(*(self.outputs[k] for k in parsed.checkpoints))
        inside = {s for k, made in enumerate(self.made) if k not in parsed.saved for s in made}
        actions = complete_actions(self.graph, sorted((inside - kept) & self.graph.stored), kept)
        often = {s: count for op, count in self._often(parsed).items() for s in self.graph.ops[op].makes if count > 1}
        replays = {s: count for s, count in sorted(often.items()) if actions.get(s) == RECOMPUTE}
        return Candidate(actions, replays=replays)

    def _often(self, parsed: _Parsed) -> dict[int, int]:
        """How often each op of a stage that is not saved runs again."""
        found = {}
        for k, runs in enumerate(parsed.runs):
            if k not in parsed.saved:
                for_output, for_backward = self._work(k, k in parsed.checkpoints)
                for op in sorted(for_output | for_backward):
                    found[op] = runs.through * (op in for_output) + runs.inner * (op in for_backward) + runs.both
        return found

    def _work(self, stage: int, checkpoint: bool) -> _Work:
        """What a run of ``stage`` takes; ``checkpoint``: its output is there already."""
        if (stage, checkpoint) not in self._known_work:
            free = self.made[stage] - self.kept - (self.outputs[stage] if checkpoint else frozenset())
            self._known_work[stage, checkpoint] = _Work(
                ops_that_make(self.graph, self.outputs[stage] & free, free),
                ops_that_make(self.graph, (self.graph.stored & free) - self.outputs[stage], free),
            )
        return self._known_work[stage, checkpoint]

    @cached_property
    def _floors(self) -> list[tuple[int, int]]:
        """Bytes that each stage would hold when backward begins, without its output, and of its output."""
        found = []
        for made, output in zip(self.made, self.outputs, strict=True):
            held = (made & stored_at_backward_start(self.graph)) - self.kept
            sizes = {s: self.graph.storages[s].bytes for s in held}
            found.append((sum(sizes[s] for s in held - output), sum(sizes[s] for s in held & output)))
        return found

    def _ms(self, events: Iterable[int]) -> float:
        runs = (number for kind, number in (self.graph.events[e] for e in events) if kind == RUN)
        return sum(self.context.costs.op_ms[number] for number in runs)

    def _run_peak(self, stage: int) -> int:
        """Most bytes at once when a stage runs for its output alone and each value goes with its last reader."""
        graph = self.graph
        free = self.made[stage] - self.kept
        ops = sorted(ops_that_make(graph, self.outputs[stage], free))
        last = {s: op for op in ops for s in graph.ops[op].reads if s in free}
        last.update(dict.fromkeys(self.outputs[stage], -1))
        live = peak = 0
        for number in ops:
            op = graph.ops[number]
            live += sum(graph.storages[s].bytes for s in op.makes)
            peak = max(peak, live + op.workspace_bytes + op.rng_bytes)
            gone = {s for s in (*op.reads, *op.makes) if last.get(s, number) == number}
            live -= sum(graph.storages[s].bytes for s in gone if s in free or s in op.makes)
        return peak

    def _events(self) -> tuple[list[list[int]], list[list[int]]]:
        """Events of each stage, forward and backward."""
        graph, count = self.graph, len(self.outputs)
        forward: list[list[int]] = [[] for _ in range(count)]
        backward: list[list[int]] = [[] for _ in range(count)]
        packed_in: dict[int, int] = {}
        stage, backward_start = 0, step_facts(graph).backward_start
        for event, (kind, number) in enumerate(graph.events):
            if kind == RUN and event < backward_start:
                stage = self.stage_of[number]
            elif kind == PACK:
                packed_in.setdefault(number, stage)
            elif kind == UNPACK:
                stage = min(stage, packed_in.get(number, stage))
            (forward if event < backward_start else backward)[stage].append(event)
        return forward, backward


def _parse(schedule: Sequence[Step]) -> _Parsed:
    backward_start = next(i for i, step in enumerate(schedule) if step.kind == BACKWARD)
    sweep, later = schedule[:backward_start], schedule[backward_start:]
    saved = {step.stage for step in sweep if step.kind == ALL}
    checkpoints = {step.stage - 1 for step in sweep if step.kind != EMPTY and step.stage > 0} | saved
    through = Counter(step.stage for step in later if step.kind in (CK, EMPTY))
    inner, both = Counter[int](), Counter[int]()
    for step, after in pairwise(later):
        if step.kind == ALL:
            (inner if after.kind == BACKWARD else both)[step.stage] += 1
    return _Parsed(saved, checkpoints, [_Runs(through[k], inner[k], both[k]) for k in range(len(sweep))])


def _backward_bytes(graph: StepGraph) -> list[int]:
    """Bytes that backward has made and that live before each event."""
    facts, change = step_facts(graph), [0] * len(graph.events)
    for op in graph.ops:
        for s in op.makes if op.backward else ():
            change[facts.birth[s]] += graph.storages[s].bytes
            if s in facts.death:
                change[facts.death[s]] -= graph.storages[s].bytes
    return [0, *accumulate(change)]
