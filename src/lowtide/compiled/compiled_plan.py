"""A compiled model's plan: a ``Plan``, whose decisions are those inside of the layers, with the variant of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from lowtide.compiled.choice import Moment
from lowtide.compiled.layer_calls import AGAIN, LayerShape
from lowtide.explanation import Evidence
from lowtide.graph.step_graph import Frame
from lowtide.plan import RECOMPUTE, SAVE, Decision, Plan, PlannedOp
from lowtide.units import format_bytes


@dataclass(frozen=True)
class PlannedVariant:
    """A variant that the plan uses.

    Attributes:
        layers: How many layers run it.
        stored_bytes: A layer holds so much from forward to backward, by its code.
        backward_bytes: Peak of a layer's backward beyond what lives when it begins, by its code.
        step_ms: Forward and backward of one layer, as measured, and as others make believe where times differ much.
    """

    name: str
    layers: int
    stored_bytes: int
    backward_bytes: int
    step_ms: float


@dataclass(frozen=True)
class CompiledPlan(Plan):
    """What was decided for a compiled model, for one set of input shapes.

    Times are those of the layers alone, beside plain compiled ones. Peaks are absolute; the plain one is with every
    layer compiled as PyTorch does. ``save`` keeps what a ``Plan`` has; only the model that made a plan can ``use`` it.

    Attributes:
        margin_bytes: Part of every peak: how far a layer's code and the allocator were apart.
        layers: Name of the variant by layer.
        variants: Those in use.
        at_peak: What runs at the peak.
        refused: Variants that were left out, with the reason.
    """

    margin_bytes: int = 0
    layers: dict[str, str] = field(default_factory=dict)
    variants: tuple[PlannedVariant, ...] = ()
    at_peak: str = ""
    refused: tuple[str, ...] = ()

    @property
    def planning_s(self) -> float:
        """Seconds, compilation included."""
        return self.solve_s

    def to_json(self) -> str:
        """As a ``Plan``."""
        return Plan(**{f.name: getattr(self, f.name) for f in fields(Plan)}).to_json()

    def __str__(self) -> str:
        asked = "no budget" if self.budget_bytes is None else f"budget {format_bytes(self.budget_bytes)}"
        lines = [
            f"{asked}: predicted peak {format_bytes(self.predicted_peak_bytes)}, plain compiled "
            f"{format_bytes(self.plain_peak_bytes)}, of which {format_bytes(self.resident_bytes)} live throughout",
            f"layers take {100 * self.predicted_overhead:+.1f} % of time; peak in {self.at_peak}",
        ]
        lines += [
            f"  {v.layers} layers {v.name}: {format_bytes(v.stored_bytes)} each until backward, {v.step_ms:.2f} ms"
            for v in self.variants
        ]
        return "\n".join([*lines, *(f"  left out: {reason}" for reason in self.refused)])


@dataclass
class Decisions:
    """Those of all layers, as the tables of a ``Plan``."""

    decisions: list[Decision] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=lambda: [Frame(-1, "", 0)])
    ops: list[PlannedOp] = field(default_factory=list)
    num_storages: int = 0

    def add(self, name: str, shape: LayerShape, variant: str) -> None:
        """Those of the layer ``name``, which runs ``variant``."""
        layer = shape.captured.layer
        assert layer is not None
        graph, frame, first_op = layer.graph, 0, len(self.ops)
        if name:
            frame = len(self.frames)
            self.frames.append(Frame(0, name, 0))
        self.ops += [PlannedOp(op.name, frame) for op in graph.ops if not op.backward]
        names = shape.variants[variant].saved.names
        saved = set(shape.captured.plain_names if names is None else names) if variant != AGAIN else set[str]()
        made_again = set[int]()
        for storage, made in layer.names.items():
            if storage not in graph.stored and made not in saved:
                continue
            found = graph.storages[storage]
            assert found.op is not None
            action, ms = (SAVE, 0.0) if made in saved else (RECOMPUTE, layer.costs.op_ms[found.op])
            if action == RECOMPUTE and found.op in made_again:
                ms = 0.0  # outputs of one op are made by one run of it
            made_again.update([found.op] if action == RECOMPUTE else [])
            self.decisions.append(
                Decision(
                    self.num_storages + storage, action, found.bytes, first_op + found.op, found.output,
                    storage in graph.stored, ms,
                )
            )  # fmt: skip
        self.num_storages += len(graph.storages)


def decisions_of(shapes: Mapping[str, LayerShape], variants: Mapping[str, str]) -> Decisions:
    """What each layer saves and makes again under its variant."""
    found = Decisions()
    for name, shape in shapes.items():
        found.add(name, shape, variants[name])
    return found


def evidence_of(moment: Moment | None) -> Evidence | None:
    """What runs at the peak."""
    return None if moment is None else Evidence(when=moment.kind, module=moment.layer, op="compiled code")
