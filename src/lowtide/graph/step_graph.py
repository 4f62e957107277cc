"""One training step as plain data: which operators ran, what they made, what autograd stored, when it all died.

The tracer writes it, solvers and the simulator read it. No torch here: a graph comes from JSON just as well.
"""

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

VERSION = 2
NEW_GRADIENT = "new_gradient"  # see ``Storage.kind``
GONE_GRADIENT = "gone_gradient"  # likewise
COMPILED_CODE = "lowtide.compiled.region"  # name of the op that a call of compiled code is

# Events, in the order of the step. The second number is an op, a storage or a saved-tensor id.
RUN = 0  # op executes
FREE = 1  # the last Python or engine reference to a storage goes; autograd may still hold it
PACK = 2  # autograd stores a tensor for backward (saved id)
UNPACK = 3  # backward takes it out; it is referenced until DROP
DROP = 4  # what UNPACK handed out is referenced no more
RELEASE = 5  # autograd lets the saved tensor go
EVENT_NAMES = ("run", "free", "pack", "unpack", "drop", "release")


@dataclass(frozen=True, slots=True)
class Storage:
    """A piece of memory; views of it are free.

    Attributes:
        bytes: As the device's allocator counts them.
        kind: ``activation`` (made in forward), ``backward`` (made in backward), ``new_gradient`` (made in backward
            too, and a parameter's ``.grad`` after the step), ``gone_gradient`` (a ``.grad`` from before that goes with
            ``zero_grad`` between forward and backward, for plans something that the first op makes), or what was there
            before the step and stays: ``parameter``, ``gradient``, ``buffer``, ``input``, ``other``.
        op: The op that makes it; None when it was there before.
        output: Which of that op's flattened outputs.
        fixed: Why it must be saved if anything needs it ("" when it may be recomputed).
    """

    id: int
    bytes: int
    kind: str
    op: int | None = None
    output: int = 0
    fixed: str = ""


@dataclass(frozen=True, slots=True)
class Op:
    """One ATen operator, run once.

    Attributes:
        name: With overload, ``aten.mm.default``.
        frame: Index into ``StepGraph.frames``: the module call it ran in.
        backward: Ran in a backward whose results nobody differentiates: one that creates a graph is part of a loss.
        reads, makes, writes: Storage ids. ``writes`` are changed in place (``makes`` are new).
        workspace_bytes: Peak of what the op allocates inside itself beyond what it makes.
        rng_bytes: What of the device's memory the generator state takes that a replay must keep: nothing of an
            accelerator's.
        signature: Index into ``StepGraph.signatures``; equal signatures take equal time.
        dynamic: Shapes depend on values, so the next step may show other shapes here.
        completes_inplace: The op whose output this one completes in place, before anything else has read it (a dropout
            mask, an in-place activation): the two are one when replayed. What the completing op reads and draws is
            counted with the op that it completes, and so is its time.
    """

    id: int
    name: str
    frame: int
    backward: bool
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    writes: tuple[int, ...] = ()
    workspace_bytes: int = 0
    rng_bytes: int = 0
    signature: int = 0
    dynamic: bool = False
    completes_inplace: int | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of one module: ``ordinal``-th call of ``path`` within the parent's call. Frame 0 is the step itself."""

    parent: int
    path: str
    ordinal: int


@dataclass(frozen=True)
class StepGraph:
    """A traced training step.

    Attributes:
        device: Its type, such as ``cpu``; ``device_name`` says which.
        resident: What the step leaves, bytes by part: ``parameters``, ``gradients``, ``buffers``, ``batch``,
            ``optimizer``, ``other``; of a trace without memory ``workspaces``, what the BLAS library keeps for the
            threads that multiply. All of it lives through the whole step, but the gradients that backward makes.
        signatures: Operator and argument descriptions, enough to run an op like it for timing.
        saved: Storage id of each saved tensor, by saved id.
        events: ``(kind, id)`` in program order.
        calls: Input signature of each call of the model in the step (how a plan finds its shape again).
        region: ``model`` (what runs outside the model's own calls is not taped) or ``step``.
        optimizer_step_bytes: Temporaries of ``optimizer.step()``, reported beside the peak.
        written_parameters: Names of the parameters that the step itself writes.
        retained_backwards: The first and the last op of each backward pass that left its graph for another one.
        recorded_ms: By signature, the time of its one run while tracing, for what cannot be run again (compiled code).
        provenance: Facts for readers; nothing is decided by them.
    """

    device: str
    device_name: str
    resident: dict[str, int]
    signatures: tuple[dict, ...]
    frames: tuple[Frame, ...]
    storages: tuple[Storage, ...]
    ops: tuple[Op, ...]
    saved: tuple[int, ...]
    events: tuple[tuple[int, int], ...]
    calls: tuple[str, ...] = ()
    region: str = "model"
    optimizer_step_bytes: int = 0
    written_parameters: tuple[str, ...] = ()
    retained_backwards: tuple[tuple[int, int], ...] = ()
    recorded_ms: dict[int, float] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is kept beside the fields: results belong to this very graph (``memo``)."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @cached_property
    def resident_bytes(self) -> int:
        """Live bytes after the step, gradients and declared optimizer state included: no plan changes that."""
        return sum(self.resident.values())

    @cached_property
    def before(self) -> dict[str, int]:
        """``resident`` without the gradients that backward makes: what is there before the step, and stays."""
        made = sum(s.bytes for s in self.storages if s.kind == NEW_GRADIENT)
        return {part: size - made if part == "gradients" else size for part, size in self.resident.items()}

    @cached_property
    def start_bytes(self) -> int:
        """Live bytes before the step, but for gradients that go in it."""
        return sum(self.before.values())

    @cached_property
    def gone_bytes(self) -> int:
        """Of gradients that are there before the step and go between forward and backward."""
        return sum(s.bytes for s in self.storages if s.kind == GONE_GRADIENT)

    @cached_property
    def before_bytes(self) -> int:
        """Live bytes before the step."""
        return self.start_bytes + self.gone_bytes

    @cached_property
    def stored(self) -> frozenset[int]:
        """Storages made by forward ops that autograd stores for backward."""
        makers = {s: self.storages[s].op for s in self.saved}
        return frozenset(s for s, op in makers.items() if op is not None and not self.ops[op].backward)

    @cached_property
    def forward_ops(self) -> tuple[Op, ...]:
        return tuple(op for op in self.ops if not op.backward)

    def scope(self, op: Op) -> str:
        """Module path of ``op`` as users know it; "" is the model or the step itself."""
        return self.frames[op.frame].path

    def moved_bytes(self, op: Op) -> int:
        """Of the storages that ``op`` reads, makes and writes."""
        return sum(self.storages[s].bytes for s in {*op.reads, *op.makes, *op.writes})

    def with_completions(self, op_ms: list[float]) -> list[float]:
        """Times in which an op that completes another one's output in place is part of that: both are replayed."""
        for op in self.ops:
            if op.completes_inplace is not None:
                op_ms[op.completes_inplace] += op_ms[op.id]
                op_ms[op.id] = 0.0
        return op_ms

    @cached_property
    def fingerprint(self) -> str:
        """Content hash: a plan belongs to exactly one graph."""
        text = json.dumps(to_dict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_dict(graph: StepGraph) -> dict:
    """Plain JSON types; ``json_format.from_dict`` reads them back and checks them."""
    body = {
        "version": VERSION,
        "device": graph.device,
        "device_name": graph.device_name,
        "resident": dict(graph.resident),
        "signatures": list(graph.signatures),
        "frames": [[f.parent, f.path, f.ordinal] for f in graph.frames],
        "storages": [[s.bytes, s.kind, s.op, s.output, s.fixed] for s in graph.storages],
        "ops": [
            [o.name, o.frame, int(o.backward), list(o.reads), list(o.makes), list(o.writes),
             o.workspace_bytes, o.rng_bytes, o.signature, int(o.dynamic), o.completes_inplace]
            for o in graph.ops
        ],
        "saved": list(graph.saved),
        "events": [x for event in graph.events for x in event],
        "calls": list(graph.calls),
        "region": graph.region,
        "optimizer_step_bytes": graph.optimizer_step_bytes,
        "written_parameters": list(graph.written_parameters),
        "recorded_ms": [[signature, ms] for signature, ms in graph.recorded_ms.items()],
        "provenance": dict(graph.provenance),
    }  # fmt: skip
    if graph.retained_backwards:  # files of other steps are as they were before this was told
        body["retained_backwards"] = [list(span) for span in graph.retained_backwards]
    return body
