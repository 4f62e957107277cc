"""A plan: one decision per storage, predicted peak and time, and its JSON. Needs no graph to be applied."""

import importlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from lowtide.errors import GraphFormatError
from lowtide.explanation import Evidence, Explanation, largest_decisions, told_of_functions
from lowtide.graph.costs import DISK, HOST
from lowtide.graph.function_ops import PREFIX, short_name
from lowtide.graph.step_graph import Frame

VERSION = 2
SAVE, RECOMPUTE, CPU_OFFLOAD, DISK_OFFLOAD = "save", "recompute", "cpu_offload", "disk_offload"
ACTIONS = (SAVE, RECOMPUTE, CPU_OFFLOAD, DISK_OFFLOAD)
TIER_OF = {CPU_OFFLOAD: HOST, DISK_OFFLOAD: DISK}  # where an action moves a storage
COMPILED = "compiled"  # the method of plans inside of compiled layers
ALLOCATED, RESERVED = BUDGET_KINDS = "allocated", "reserved"  # what a budget is stated in


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one storage between forward and backward.

    Attributes:
        op: Index into ``Plan.ops``: the forward op that makes it.
        output: Which of that op's flattened outputs.
        stored: Autograd stores it in the plain step (False: only replays need it).
        recompute_ms: Time of one replay of its op (0 unless recomputed).
        replays: How often its op may run again in one backward. All replays but the last are transient: their result
            is used only within one burst, or by one backward op. The count is the op's, so of several recomputed
            outputs the largest holds.
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
        completes_inplace: Index of the op whose output this one completes in place (see ``Op.completes_inplace``).
        num_dropped_inputs: How many dropped or moved storages it reads. Where fewer come, a recipe would hold what the
            plan lets go.
    """

    name: str
    frame: int
    dynamic: bool = False
    completes_inplace: int | None = None
    num_dropped_inputs: int = 0


@dataclass(frozen=True)
class Moves:
    """When offloaded storages are stored and fetched.

    Attributes:
        max_inflight_bytes: Most bytes in flight to a tier at once; a larger storage goes alone.
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
        budget_kind: What the budget is stated in: ``allocated`` bytes, or those that the allocator has ``reserved``.
        predicted_peak_bytes, plain_peak_bytes: Absolute allocated bytes, by the simulator.
        resident_bytes: What the step leaves: parameters, gradients, optimizer, batch. No plan stays below.
        start_bytes: Of that, what is there before the step: not the gradients that backward makes. None in plans made
            before that was told apart: all of it.
        activation_bytes: What percentages are of: the plain step's peak beside ``resident_bytes``, gradients there
            before it. None in plans as above.
        passes: Backward passes that ask for the same saved tensor. Above 1 each is part of the plan: replays are
            counted over all of them, and an op with no more replays than passes keeps what it makes for a pass. Else
            they are counted anew in every backward over a retained graph.
        predicted_counted_peak_bytes: ``predicted_peak_bytes`` as the device's statistics count it
            (``max_memory_allocated``): a large block keeps up to 1 MiB that is not split off. None where that is not
            known.
        predicted_reserved_peak_bytes: What the device's allocator reserves for such steps; None where that is not known
            (a CPU has no such allocator).
        predicted_step_ms, plain_step_ms: Forward and backward.
        bound_ms: No plan within the budget has a shorter step; None without a budget.
        bound_model: The set of plans that ``bound_ms`` holds for, in words.
        max_inflight_bytes: Most bytes of offloaded storages in flight at once.
        written_parameters: Names of the parameters that the step itself writes.
        evidence: What ``explain`` needs beyond the decisions; None in plans made before there was any.
        status: ``optimal`` (within the solver's tolerance), ``feasible`` (a limit was hit, or a device's blocks take
            a part of the budget), or ``fixed`` (a classic).
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
    evidence: Evidence | None = None
    written_parameters: tuple[str, ...] = ()
    provenance: dict[str, str] = field(default_factory=dict)
    budget_kind: str = ALLOCATED
    predicted_reserved_peak_bytes: int | None = None
    predicted_counted_peak_bytes: int | None = None
    start_bytes: int | None = None
    activation_bytes: int | None = None
    passes: int = 1

    @property
    def before_bytes(self) -> int:
        """Live bytes before the step."""
        return self.resident_bytes if self.start_bytes is None else self.start_bytes

    @property
    def budgeted_peak_bytes(self) -> int:
        """The predicted peak of the kind that the budget is stated in."""
        if self.budget_kind == RESERVED and self.predicted_reserved_peak_bytes is not None:
            return self.predicted_reserved_peak_bytes
        return self.predicted_peak_bytes

    @property
    def measurable_peak_bytes(self) -> int:
        """The predicted peak that a measurement of allocated bytes on the device is to show."""
        counted = self.predicted_counted_peak_bytes
        return self.predicted_peak_bytes if counted is None else counted

    @property
    def predicted_overhead(self) -> float:
        """Step time under the plan / plain step time - 1."""
        return self.predicted_step_ms / self.plain_step_ms - 1 if self.plain_step_ms else 0.0

    @property
    def predicted_fraction(self) -> float:
        """What the plan takes beside ``resident_bytes`` / activation memory of the plain step."""
        return self.fraction_of(self.predicted_peak_bytes)

    def fraction_of(self, peak_bytes: int) -> float:
        """What a step of this peak takes beside ``resident_bytes`` / activation memory of the plain step."""
        whole = self.activation_bytes
        whole = self.plain_peak_bytes - self.resident_bytes if whole is None else whole
        return (peak_bytes - self.resident_bytes) / whole if whole else 1.0

    @property
    def gap(self) -> float:
        """(predicted step ms - bound ms) / bound ms; NaN where no bound is known."""
        return (self.predicted_step_ms - self.bound_ms) / self.bound_ms if self.bound_ms else float("nan")

    @property
    def counts(self) -> dict[str, int]:
        """Action -> number of the storages that the plain step stores."""
        return {a: sum(d.stored and d.action == a for d in self.decisions) for a in ACTIONS}

    @property
    def bytes_by_action(self) -> dict[str, int]:
        """Action -> bytes of the storages that the plain step stores."""
        return {a: sum(d.bytes for d in self.decisions if d.stored and d.action == a) for a in ACTIONS}

    @property
    def keeps_everything(self) -> bool:
        return all(d.action == SAVE for d in self.decisions)

    def explain(self) -> Explanation:
        """What fills memory at the peak, what more memory would save, and the largest decisions; ``print`` it."""
        evidence = self.evidence or Evidence(when="", module="", op="")
        excess_ms = max(self.predicted_step_ms - self.plain_step_ms, 0.0)
        rows: list[tuple[str, str, str, int, float]] = []
        timed: set[int] = set()
        for d in self.decisions:
            # Outputs of one op are replayed by one run of it.
            ms = 0.0 if d.op in timed else d.recompute_ms
            timed.update((d.op,) if ms else ())
            rows.append((d.action, self.scope(d), self.ops[d.op].name, d.bytes, ms))
        return Explanation(
            **vars(evidence),
            peak_bytes=self.predicted_peak_bytes,
            resident_bytes=self.before_bytes,
            counted_peak_bytes=self.measurable_peak_bytes,
            reserved_peak_bytes=self.predicted_reserved_peak_bytes,
            ms_per_gib=None if evidence.ms_per_byte is None else min(evidence.ms_per_byte * 2**30, excess_ms),
            decisions=largest_decisions(rows, evidence.ms_per_byte),
        )

    def opaque_calls(self, ops: Collection[int] | None = None) -> str:
        """The share of the stored bytes that calls made which are one op, and which run again; "" if there are none.

        Args:
            ops: Numbers of the ops that run again; by default as planned.
        """
        if self.evidence is None or not self.evidence.functions:
            return ""
        numbers = {d.op for d in self.decisions if d.action == RECOMPUTE} if ops is None else ops
        names = (self.ops[n].name for n in numbers)
        return told_of_functions(self.evidence, {short_name(name) for name in names if name.startswith(PREFIX)})

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
        """When offloaded storages are stored and fetched."""
        return Moves(self.max_inflight_bytes, {d.storage: d.fetch_at for d in self.decisions if d.fetch_at is not None})

    @cached_property
    def tiers(self) -> frozenset[str]:
        """Where the plan moves storages to: some of ``host`` and ``disk``."""
        return frozenset(TIER_OF[d.action] for d in self.decisions if d.action in TIER_OF)

    def _repr_html_(self) -> str:
        return in_notebook("plan_html", self)

    def to_json(self) -> str:
        body = {f: getattr(self, f) for f in self.__dataclass_fields__}
        body["version"] = VERSION
        body["evidence"] = None if self.evidence is None else asdict(self.evidence)
        for table, row in _TABLES.items():
            columns = [field.name for field in fields(row)]
            rows = [[getattr(entry, column) for column in columns] for entry in body[table]]
            body[table] = {"columns": columns, "rows": rows}
        return json.dumps(body, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Raises: GraphFormatError: not a plan, or of another version."""
        try:
            body = json.loads(text)
        except json.JSONDecodeError as error:
            raise GraphFormatError(f"not a plan: the file is not JSON ({error}). Write it with plan.save().") from error
        if not isinstance(body, dict):
            raise GraphFormatError(f"not a plan: a {type(body).__name__}, not an object. Write one with plan.save().")
        version = body.pop("version", None)
        if "decisions" not in body and "events" in body:
            raise GraphFormatError("not a plan: this is a traced step (a graph). Plan it with lowtide.solve().")
        if version != VERSION:
            raise GraphFormatError(
                f"not a plan: field 'version' is {version!r}, not {VERSION}. Make the plan again with this lowtide."
            )
        try:
            for table, row in _TABLES.items():
                columns, rows = body[table]["columns"], body[table]["rows"]
                body[table] = [row(**dict(zip(columns, values, strict=True))) for values in rows]
            if body.get("evidence") is not None:
                body["evidence"] = Evidence.from_dict(body["evidence"])
            arguments: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in body.items()}
            plan = Plan(**arguments)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise GraphFormatError(f"not a plan: {error}. Make the plan again with plan.save().") from error
        for name in _TABLES:
            for i, entry in enumerate(getattr(plan, name)):
                if not plan._is_good(i, entry):
                    raise GraphFormatError(f"not a plan: field '{name}[{i}]' is {entry}. Make the plan again.")
        return plan

    def _is_good(self, i: int, entry: Frame | PlannedOp | Decision) -> bool:
        """Whether row ``i`` of its table has the right types, and refers to rows that exist."""
        if isinstance(entry, Frame):
            return isinstance(entry.path, str) and isinstance(entry.parent, int) and -1 <= entry.parent < max(i, 0)
        if isinstance(entry, PlannedOp):
            typed = isinstance(entry.name, str) and isinstance(entry.dynamic, bool) and _count(entry.num_dropped_inputs)
            earlier = entry.completes_inplace is None or _count(entry.completes_inplace, i)
            return typed and earlier and _count(entry.frame, len(self.frames))
        fetch_at = 0 if entry.fetch_at is None else entry.fetch_at
        counts = entry.storage, entry.bytes, entry.output, entry.replays, fetch_at
        good = all(map(_count, counts)) and entry.replays > 0
        return good and entry.action in ACTIONS and _count(entry.op, len(self.ops))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> "Plan":
        return Plan.from_json(Path(path).read_text())


def in_notebook(name: str, shown: object) -> str:
    """``shown`` as ``reports/notebook.py`` draws it under ``name``.

    Plain data stands before the reports that draw it: they are looked up when a notebook asks, and never imported here.
    """
    return getattr(importlib.import_module("lowtide.reports.notebook"), name)(shown)


_TABLES: dict[str, type] = {"decisions": Decision, "frames": Frame, "ops": PlannedOp}  # fields that are rows of a file


def _count(number: object, limit: float = math.inf) -> bool:
    return isinstance(number, int) and 0 <= number < limit
