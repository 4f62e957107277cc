"""A plan: one decision per storage, what it predicts, how it knows. JSON in and out; needs no graph to be applied."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lowtide.errors import GraphFormatError
from lowtide.explanation import Explanation, read_evidence, read_links, weigh
from lowtide.graph.costs import DISK, HOST
from lowtide.graph.step_graph import Frame

VERSION = 1
SAVE, RECOMPUTE, CPU_OFFLOAD, DISK_OFFLOAD = "save", "recompute", "cpu_offload", "disk_offload"
ACTIONS = (SAVE, RECOMPUTE, CPU_OFFLOAD, DISK_OFFLOAD)
TIER_OF = {CPU_OFFLOAD: HOST, DISK_OFFLOAD: DISK}  # where an action moves a storage


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one storage between forward and backward.

    Attributes:
        op: Index into ``Plan.ops``: the forward op that makes it.
        output: Which of that op's flattened outputs.
        stored: Autograd stores it in the plain step (False: only replays need it).
        recompute_ms: Time of one replay of its op (0 unless recomputed).
        replays: How often its op may run again in one backward. All runs but the last make it only for the burst that
            asked, or for the backward op that it is handed to; the last makes it for good. The count is the op's: of
            several recomputed outputs the largest counts.
        fetch_at: Of a moved storage: the number of the unpack in backward, from 0, at which its fetch starts; None:
            when it is needed.
    """

    storage: int
    action: str
    bytes: int
    op: int
    output: int
    stored: bool
    recompute_ms: float = 0.0
    replays: int = 1
    fetch_at: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """A forward op as the tape will meet it: ``name`` in ``frame``, in order.

    Attributes:
        dynamic: The next step may show other shapes here.
        completes_inplace: Index of the op whose output this one completes in place (see ``Op.finishes``).
        needs: How many dropped or moved storages it reads. Where fewer come, a recipe would hold what the plan lets go.
    """

    name: str
    frame: int
    dynamic: bool = False
    completes_inplace: int | None = None
    needs: int = 0


@dataclass(frozen=True)
class Moves:
    """When moved storages travel.

    Attributes:
        max_inflight_bytes: Most bytes on their way out at once; a storage larger than that goes alone.
        fetch_at: Storage -> the number of the unpack, counted from 0 through backward, at which its fetch starts.
            A storage without one is fetched when it is needed.
    """

    max_inflight_bytes: int = 0
    fetch_at: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Decisions and their evidence.

    Attributes:
        decisions: One per stored storage, and per unstored one that a replay needs.
        budget_bytes: Absolute peak that was asked for; None without a budget.
        predicted_peak_bytes, plain_peak_bytes, resident_bytes: Absolute allocated bytes, by the simulator.
        predicted_step_ms, plain_step_ms: Forward and backward.
        bound_ms: No plan within the budget has a shorter step; None without a budget. ``bound_model``: which plans that
            speaks of, in words.
        max_inflight_bytes: Most bytes of moved storages that may be on their way out at once.
        written_parameters: Names of the parameters that the step itself writes.
        evidence: What ``explain`` needs beyond the decisions; empty in plans made before there was any.
        status: ``optimal`` (within the solver's tolerance), ``feasible`` (a limit was hit), or ``fixed`` (a classic).
    """

    method: str
    decisions: tuple[Decision, ...]
    frames: tuple[Frame, ...]
    ops: tuple[PlannedOp, ...]
    graph_fingerprint: str
    budget_bytes: int | None
    predicted_peak_bytes: int
    plain_peak_bytes: int
    resident_bytes: int
    predicted_step_ms: float
    plain_step_ms: float
    bound_ms: float | None
    status: str
    solve_s: float
    device: str = "cpu"
    calls: tuple[str, ...] = ()
    region: str = "model"
    bound_model: str = ""
    max_inflight_bytes: int = 0
    evidence: dict[str, Any] = field(default_factory=dict)
    written_parameters: tuple[str, ...] = ()
    provenance: dict[str, str] = field(default_factory=dict)

    @property
    def predicted_overhead(self) -> float:
        """Step time under the plan / plain step time - 1."""
        return self.predicted_step_ms / self.plain_step_ms - 1 if self.plain_step_ms else 0.0

    @property
    def predicted_fraction(self) -> float:
        """Activation memory under the plan / activation memory of the plain step."""
        plain = self.plain_peak_bytes - self.resident_bytes
        return (self.predicted_peak_bytes - self.resident_bytes) / plain if plain else 1.0

    @property
    def gap(self) -> float:
        """(predicted step ms - bound ms) / bound ms; NaN where no bound is known."""
        return (self.predicted_step_ms - self.bound_ms) / self.bound_ms if self.bound_ms else float("nan")

    @property
    def counts(self) -> dict[str, int]:
        """How many of the storages that the plain step stores have each fate."""
        return {a: sum(d.stored and d.action == a for d in self.decisions) for a in ACTIONS}

    @property
    def bytes_by_action(self) -> dict[str, int]:
        """Bytes of the storages that the plain step stores, by fate."""
        return {a: sum(d.bytes for d in self.decisions if d.stored and d.action == a) for a in ACTIONS}

    @property
    def keeps_everything(self) -> bool:
        return all(d.action == SAVE for d in self.decisions)

    def explain(self) -> Explanation:
        """What binds the peak, what more memory would buy, and which decisions weigh most; ``print`` it."""
        when, module, op, holders, other_bytes, price = read_evidence(self.evidence)
        excess_ms = max(self.predicted_step_ms - self.plain_step_ms, 0.0)
        rows: list[tuple[str, str, str, int, float]] = []
        timed: set[int] = set()
        for d in self.decisions:
            # Outputs of one op are replayed by one run of it.
            ms = 0.0 if d.op in timed else d.recompute_ms
            timed.update((d.op,) if ms else ())
            rows.append((d.action, self.scope(d), self.ops[d.op].name, d.bytes, ms))
        return Explanation(
            peak_bytes=self.predicted_peak_bytes,
            resident_bytes=self.resident_bytes,
            when=when,
            module=module,
            op=op,
            holders=holders,
            other_bytes=other_bytes,
            ms_per_byte=price,
            ms_per_gib=None if price is None else min(price * 2**30, excess_ms),
            decisions=weigh(rows, price),
            links=read_links(self.evidence),
        )

    def scope(self, decision: Decision) -> str:
        """Module path of the op that makes the storage."""
        return self.frames[self.ops[decision.op].frame].path

    def action_of(self) -> dict[int, str]:
        """Storage id -> action."""
        return {d.storage: d.action for d in self.decisions}

    def replays_of(self) -> dict[int, int]:
        """Storage id -> replays, of the recomputed storages whose op may run again more than once."""
        return {d.storage: d.replays for d in self.decisions if d.action == RECOMPUTE and d.replays > 1}

    @property
    def moves(self) -> Moves:
        """When moved storages travel."""
        return Moves(self.max_inflight_bytes, {d.storage: d.fetch_at for d in self.decisions if d.fetch_at is not None})

    @property
    def tiers(self) -> frozenset[str]:
        """Where the plan moves storages to: some of ``host`` and ``disk``."""
        return frozenset(TIER_OF[d.action] for d in self.decisions if d.action in TIER_OF)

    def to_json(self) -> str:
        body = {f: getattr(self, f) for f in self.__dataclass_fields__}
        body["version"] = VERSION
        body["decisions"] = [list(asdict(d).values()) for d in self.decisions]
        body["frames"] = [list(asdict(f).values()) for f in self.frames]
        body["ops"] = [[o.name, o.frame, int(o.dynamic), o.completes_inplace, o.needs] for o in self.ops]
        return json.dumps(body, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Plan:
        """Raises: GraphFormatError: not a plan, or of another version."""
        try:
            body = json.loads(text)
        except json.JSONDecodeError as error:
            raise GraphFormatError(f"not a plan: the file is not JSON ({error}). Write it with plan.save().") from error
        if not isinstance(body, dict) or body.pop("version", None) != VERSION:
            raise GraphFormatError(
                f"not a plan: field 'version' is not {VERSION}. Make the plan again with this lowtide."
            )
        try:
            body["decisions"] = tuple(Decision(*d) for d in body["decisions"])
            body["frames"] = tuple(Frame(*f) for f in body["frames"])
            body["ops"] = tuple(PlannedOp(name, frame, bool(dyn), *rest) for name, frame, dyn, *rest in body["ops"])
            body["calls"] = tuple(body["calls"])
            body["written_parameters"] = tuple(body.get("written_parameters", ()))
            plan = Plan(**body)
            read_evidence(plan.evidence)
            read_links(plan.evidence)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise GraphFormatError(f"not a plan: {error}. Make the plan again with plan.save().") from error
        for name, good in (("frames", plan._frame_is_good), ("ops", plan._op_is_good), ("decisions", plan._is_good)):
            for i, entry in enumerate(body[name]):
                if not good(i, entry):
                    raise GraphFormatError(f"not a plan: field '{name}[{i}]' is {entry}. Make the plan again.")
        return plan

    def _frame_is_good(self, i: int, frame: Frame) -> bool:
        return isinstance(frame.path, str) and isinstance(frame.parent, int) and -1 <= frame.parent < max(i, 0)

    def _op_is_good(self, i: int, op: PlannedOp) -> bool:
        completes_inplace = op.completes_inplace is None or (
            isinstance(op.completes_inplace, int) and 0 <= op.completes_inplace < i
        )
        needs = isinstance(op.needs, int) and op.needs >= 0
        return isinstance(op.name, str) and _index(op.frame, self.frames) and completes_inplace and needs

    def _is_good(self, _: int, decision: Decision) -> bool:
        counts = (decision.storage, decision.bytes, decision.output)
        at_least_0 = all(isinstance(n, int) and n >= 0 for n in counts)
        at_least_0 &= isinstance(decision.replays, int) and decision.replays >= 1
        at_least_0 &= decision.fetch_at is None or (isinstance(decision.fetch_at, int) and decision.fetch_at >= 0)
        return at_least_0 and decision.action in ACTIONS and _index(decision.op, self.ops)

    def __getstate__(self) -> dict[str, Any]:
        """Without what others keep beside the fields (the tape's program refers to operators, which do not pickle)."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        return Plan.from_json(Path(path).read_text())


def _index(number: object, of: tuple) -> bool:
    return isinstance(number, int) and 0 <= number < len(of)
