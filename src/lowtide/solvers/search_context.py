"""What all searches on one step share: its graph, costs and limits, and what the simulator says of a candidate."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lowtide.graph.costs import Costs
from lowtide.graph.facts import step_facts
from lowtide.graph.step_graph import RUN, StepGraph
from lowtide.plan import RECOMPUTE
from lowtide.simulation.replay_bursts import Replay
from lowtide.simulation.simulator import Timeline, simulate_actions
from lowtide.solvers import tuning
from lowtide.solvers.candidate import Candidate
from lowtide.solvers.graph_queries import choices, complete_actions, ops_worth_replaying


@dataclass(frozen=True)
class Limits:
    """How long to search.

    Attributes:
        time_limit_s: Of each stage of the search for the fastest plan; a safety net, because what a clock cuts off
            differs from run to run. The search for the least peak is limited by counts alone.
        node_limit: Branch-and-bound nodes of one MILP.
        gap: Relative to the recompute time; None: 0 on tiny graphs, 1 % on others.
        multi_segment: Whether to try runs of several segments where single segments leave a plan far from the bound.
    """

    time_limit_s: float = tuning.TIME_LIMIT_S
    node_limit: int = tuning.NODE_LIMIT
    gap: float | None = None
    multi_segment: bool = True


@dataclass(frozen=True)
class Evaluated:
    """A candidate and the simulated step."""

    candidate: Candidate
    timeline: Timeline

    @property
    def actions(self) -> dict[int, str]:
        return self.candidate.actions

    @property
    def replays(self) -> dict[int, int]:
        return self.candidate.replays

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak_bytes

    @property
    def rank(self) -> tuple[float, int]:
        """Lower is better: faster, of about equally fast ones with fewer transfers, of equal ones the lower peak."""
        busy_ms = sum(t.end_ms - t.start_ms for t in self.timeline.transfers)
        return self.timeline.step_ms + tuning.TRANSFER_INTERFERENCE * busy_ms, self.timeline.peak_bytes


@dataclass(frozen=True)
class SearchResult:
    """What one search found."""

    best: Evaluated | None  # the fastest candidate within the budget; None where none was found
    proven: bool  # the model has no faster candidate, within the tolerance
    bound_ms: float  # no candidate of the model has a shorter step

    @property
    def best_ms(self) -> float:
        """Step time of ``best``; infinite where there is none."""
        return math.inf if self.best is None else self.best.timeline.step_ms


class SearchContext:
    """One step, the limits of its search, and how to evaluate a candidate."""

    def __init__(self, graph: StepGraph, costs: Costs, limits: Limits | None = None) -> None:
        self.graph, self.costs, self.limits = graph, costs, limits or Limits()

    @cached_property
    def per_op(self) -> bool:
        """Whether the step is modelled op by op."""
        return len(ops_worth_replaying(self.graph)) <= tuning.PER_OP_MODEL_OPS

    @cached_property
    def plain(self) -> Evaluated:
        """The step that saves everything."""
        return self.evaluate(complete_actions(self.graph, ()))

    @cached_property
    def floor_ms(self) -> float:
        """Step time without replays under a plan that recomputes or offloads: the tape watches all of forward."""
        return self.costs.plain_step_ms + self.costs.dispatch_us / 1e3 * len(self.graph.forward_ops)

    def simulated(self, candidate: Candidate, limit_bytes: float = math.inf) -> Evaluated:
        """``candidate`` with its timeline; ``limit_bytes`` as for ``simulate_actions``."""
        line = simulate_actions(
            self.graph, self.costs, candidate.actions, candidate.replays, candidate.moves, limit_bytes
        )
        return Evaluated(candidate, line)

    def evaluate(
        self, actions: dict[int, str], replays: Mapping[int, int] | None = None, limit_bytes: float = math.inf
    ) -> Evaluated:
        """``actions`` with their timeline; ``replays`` of storages that they do not recompute are dropped."""
        again = {s: count for s, count in (replays or {}).items() if actions.get(s) == RECOMPUTE and count > 1}
        return self.simulated(Candidate(actions, replays=again), limit_bytes)

    def event_times(self, replays: Iterable[Replay] = ()) -> list[float]:
        """Milliseconds from the start of the step to each event and to the end; ``replays`` included, no waits."""
        graph, costs = self.graph, self.costs
        extra = [0.0] * (len(graph.events) + 1)
        for replay in replays:
            extra[replay.event + 1] += costs.op_ms[replay.op] + costs.replay_us / 1e3
        now, found = 0.0, []
        for event, (kind, number) in enumerate(graph.events):
            now += extra[event]
            found.append(now)
            if kind == RUN:
                now += costs.op_ms[number] + (0.0 if graph.ops[number].backward else costs.dispatch_us / 1e3)
        return [*found, now + extra[-1]]

    def tolerances(self) -> tuple[float, float]:
        """The gap at which a search may stop: relative to the recompute time, and in milliseconds."""
        gap = self.limits.gap
        if gap is None:
            gap = 0.0 if self.per_op else tuning.GAP
        # Users pay for the step: once its time is near the bound, proving more only costs time.
        slack_ms = 0.0 if self.per_op or self.limits.gap is not None else tuning.STEP_GAP * self.costs.plain_step_ms
        return gap, slack_ms

    def within_tolerance(self, evaluated: Evaluated, bound_ms: float) -> bool:
        gap, slack_ms = self.tolerances()
        ms = evaluated.timeline.step_ms
        return ms - bound_ms <= max(slack_ms, gap * (ms - self.floor_ms))

    def save_what_fits(self, evaluated: Evaluated, budget_bytes: int) -> Evaluated:
        """``evaluated`` with every storage saved that the budget has room for, the dearest replay first."""
        graph, ops = self.graph, self.costs.op_ms
        dropped, kept = choices(graph, evaluated.actions)
        facts = step_facts(graph)
        dropped.sort(key=lambda s: (-ops[graph.storages[s].op or 0], s))
        tries = tuning.SAVE_WHAT_FITS_EVENTS // max(len(graph.events), 1)
        peaks = np.array(evaluated.timeline.event_peak_bytes)
        for storage in list(dropped):
            if tries == 0:
                break
            room = budget_bytes - int(peaks[facts.birth[storage] : facts.first_use.get(storage)].max(initial=0))
            if room < graph.storages[storage].bytes:
                continue
            tries -= 1
            fewer = [s for s in dropped if s != storage]
            trial = self.evaluate(complete_actions(graph, fewer, kept), evaluated.replays)
            if trial.peak_bytes <= budget_bytes and trial.rank <= evaluated.rank:
                evaluated, dropped, peaks = trial, fewer, np.array(trial.timeline.event_peak_bytes)
        return evaluated

    def replay_less(self, evaluated: Evaluated, budget_bytes: int) -> Evaluated:
        """``evaluated`` with each op that runs again and again bounded as far as that is faster, the dearest first.

        Of fewer replays the last one comes earlier, and what it makes stays: that may be too much.
        """
        made: dict[int, list[int]] = defaultdict(list)
        for storage in evaluated.replays:
            made[self.graph.storages[storage].op or 0].append(storage)
        runs = Counter(replay.op for replay in evaluated.timeline.replays)
        tries = tuning.SAVE_WHAT_FITS_EVENTS // max(len(self.graph.events), 1)
        for op in sorted(made, key=lambda op: (-runs[op] * self.costs.op_ms[op], op)):
            for count in range(1, min(evaluated.replays[made[op][0]], tuning.FEWER_REPLAYS + 1)):
                if tries == 0:
                    return evaluated
                tries -= 1
                fewer = evaluated.replays | dict.fromkeys(made[op], count)
                trial = self.evaluate(evaluated.actions, fewer, budget_bytes)
                if trial.peak_bytes <= budget_bytes and trial.timeline.step_ms < evaluated.timeline.step_ms:
                    evaluated = trial
                    break
        return evaluated
