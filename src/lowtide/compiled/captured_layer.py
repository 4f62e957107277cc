"""One layer as Dynamo captured it: its graph and inputs, kept so that it can be compiled in several ways, and later."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._guards import TracingContext, tracing
from torch._library.fake_class_registry import FakeScriptObject

from lowtide.compiled import collectives, op_rates, samples
from lowtide.compiled.ambient import Ambient
from lowtide.compiled.generated_code import (
    OPAQUE,
    BufferSpec,
    InputMemory,
    UnreadableCodeError,
    VariantMemory,
    read_code,
)
from lowtide.compiled.joint_nodes import JointNodes, base_of, is_size, is_tangent
from lowtide.compiled.joint_trace import JointTrace
from lowtide.compiled.kernels_later import KernelsLater
from lowtide.compiled.known_variants import KnownVariant, layer_digest
from lowtide.compiled.layer_graph import LayerGraph, layer_graph
from lowtide.compiled.partitioner import BudgetedChoices, ChoicesFoundError, PlannedPartitioner, draws
from lowtide.compiled.samples import Sample, num_parts, part_of
from lowtide.compiled.saved_sets import SavedSet, saving
from lowtide.compiled.sizes import Sizes
from lowtide.compiled.summation_order import add_up_alike
from lowtide.compiled.whole_rerun import storing_inputs_only
from lowtide.device.generators import state_bytes
from lowtide.device.names import device_name, is_accelerator
from lowtide.errors import UnsupportedModelError
from lowtide.step.subclasses import is_of_ranks

Compiled = Callable[..., Sequence[Any]]
OTHER_ORDER = "its kernels add up in another order than the plain compiled layer's, which rounding may hide for a while"


@dataclass
class Variant:
    """One way to compile a layer.

    Attributes:
        name: ``plain`` for PyTorch's own.
        saved: What it saves besides inputs; None: PyTorch's own choice.
        memory: Read from its code.
        run: The compiled function; None while only its code has been read.
        kernels: Those of ``run``: ``compile()`` waits for them before it first runs.
        sources: Code of the forward, and of the backward.
        step_ms: Forward and backward of one layer, measured, perhaps by an earlier run; 0 before.
        error: Standard error of that, as a share of it.
        code_ms: The same by the shapes in its code, on an accelerator; 0 where nobody has read it for that.
        refused: Why it is not used; "" where nothing speaks against it.
        runs_again: It is the plain one, whose forward backward runs again as a whole.
        holds_for: Conditions on sizes that its code takes for granted, and that Dynamo does not check.
    """

    name: str
    saved: SavedSet
    memory: VariantMemory
    run: Compiled | None = None
    step_ms: float = 0.0
    error: float = 0.0
    code_ms: float = 0.0
    refused: str = ""
    runs_again: bool = False
    holds_for: tuple[Any, ...] = ()
    kernels: KernelsLater = field(default_factory=KernelsLater)
    sources: tuple[str, str] = ("", "")

    @property
    def is_tried(self) -> bool:
        """It has run, in this run or an earlier one."""
        return self.run is not None or self.step_ms > 0

    def adds_up_as(self, plain: Variant) -> bool:
        """Once both have run: all sums in their kernels are in the same order."""
        return add_up_alike(plain.sources, self.sources, plain.kernels.blocks(), self.kernels.blocks())

    def take_time_of(self, other: Variant | KnownVariant) -> None:
        """The same code was timed as ``other``."""
        self.step_ms, self.error = other.step_ms, other.error


@dataclass(frozen=True)
class _Lowered:
    """A graph that Inductor has made code of.

    Attributes:
        placeholders: By name, what the graph was traced with.
        sent: What it sends, in order.
    """

    placeholders: dict[str, Any]
    source: str
    backward: bool
    results: int
    sent: tuple[str, ...]


@dataclass(frozen=True)
class _Read:
    """What code says of a variant; see ``Prices`` for the times."""

    memory: VariantMemory
    forward_ms: float
    backward_ms: float


@dataclass
class _Made:
    """Code that saves one set of values.

    Attributes:
        kernels: Those of the code: they are compiled when they are wanted.
        holds_for: Conditions on sizes under which it is right, and which Dynamo does not check.
        adds_up_alike: As the plain code does.
    """

    run: Compiled
    lowered: list[_Lowered]
    chosen: tuple[str, ...]
    kernels: KernelsLater
    holds_for: tuple[Any, ...]
    adds_up_alike: bool


@dataclass
class _Graph:
    """What is made of one captured graph, once for all sizes that it serves.

    Attributes:
        refused: By these names, why there is no code that serves more than one set of sizes.
        made: By the names that are saved; None: PyTorch's own choice.
        trace, nodes: Of its joint graph.
        key: Of that and the settings.
        num_outputs: Values that the layer returns.
        num_checked: So many conditions on sizes does Dynamo check; those that came later nobody does.
    """

    made: dict[tuple[str, ...] | None, _Made] = field(default_factory=dict)
    trace: JointTrace = field(default_factory=JointTrace)
    nodes: JointNodes | None = None
    draws: bool = False
    sends: bool = False
    key: str = ""
    num_outputs: int = 0
    num_checked: int = -1
    refused: dict[tuple[str, ...] | None, UnreadableCodeError] = field(default_factory=dict)


class CapturedLayer:
    """What Dynamo handed to the backend for one layer and one set of input shapes.

    Args:
        graph: Dynamo's graph.
        inputs: What it was called with; parameters are kept, others only described.
        round_as_eager: Values of low precision are rounded inside fused kernels too.
        dynamic: Its sizes may be symbols, so that it serves other calls too.
    """

    def __init__(
        self, graph: fx.GraphModule, inputs: Sequence[Any], *, round_as_eager: bool = False, dynamic: bool = False
    ) -> None:
        self._round_as_eager = round_as_eager
        context = TracingContext.try_get()
        assert context is not None, "Dynamo calls a backend while it traces"
        self._graph, self._context = graph, context
        self.device = device_of(inputs)
        self.ambient = Ambient.now(self.device.type)
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        self._fakes = [n.meta.get("example_value", given) for n, given in zip(placeholders, inputs, strict=True)]
        self._symbols = {i: f.node.expr for i, f in enumerate(self._fakes) if isinstance(f, torch.SymInt) and dynamic}
        self._objects = {i: t for i, (f, t) in enumerate(zip(self._fakes, inputs, strict=True)) if _is_opaque(f)}
        known = self._symbols.keys() | self._objects.keys()
        if any(not isinstance(f, torch.Tensor) for i, f in enumerate(self._fakes) if i not in known):
            raise UnsupportedModelError(
                "a compiled layer takes a number that changes between calls. lowtide.compile plans fixed sizes, and "
                "with dynamic=True sizes that change: pad the batches to a few lengths, or pass dynamic=True."
            )
        if self._symbols and any(is_of_ranks(t) for t in inputs if isinstance(t, torch.Tensor)):
            raise UnsupportedModelError(
                "a compiled layer takes DTensors, as under tensor parallelism, and sizes that change. dynamic=True is "
                "not offered there: pad the batches to a few lengths and leave it out."
            )
        self.parameters = {i: t for i, t in enumerate(inputs) if isinstance(t, nn.Parameter)}
        self._parameter_samples = {i: Sample.of(t, values=False) for i, t in self.parameters.items()}
        self._settings = (str(self.device), device_name(self.device), self.ambient, round_as_eager, _settings())
        self._code = _Graph()
        self._take([t.node.hint if isinstance(t, torch.SymInt) else t for t in inputs])

    def _take(self, inputs: Sequence[Any]) -> None:
        """Be for calls like the one with these inputs."""
        self.sizes = Sizes(tuple(self._symbols.values()), self.numbers_of(inputs))
        others = (i for i in range(len(inputs)) if i not in {*self.parameters, *self._symbols, *self._objects})
        self._others = {i: Sample.of(inputs[i]) for i in others}
        self.layer: LayerGraph | None = None

    def at(self, inputs: Sequence[Any]) -> CapturedLayer:
        """The same graph for calls of other sizes; what is compiled is compiled for both."""
        found = copy.copy(self)
        found._take(inputs)
        return found

    def numbers_of(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """The sizes that ``inputs`` of the graph come with, in the order of its symbols."""
        return tuple(int(inputs[i]) for i in self._symbols)

    @property
    def draws(self) -> bool:
        """It takes numbers from a generator."""
        return self._code.draws

    @property
    def sends(self) -> bool:
        """It sends between ranks."""
        return self._code.sends

    @property
    def returns_loss(self) -> bool:
        """It returns a number of floating point, as a model does that computes its own loss."""
        assert self._code.nodes is not None
        return self._code.nodes.returns_number

    @property
    def gradient_bytes(self) -> int:
        """Of what backward is given, where autograd makes zeros for what nobody asks a gradient of."""
        assert self._code.nodes is not None
        nodes = self._code.nodes.at(self.sizes)
        return sum(map(nodes.bytes_of, filter(is_tangent, nodes.nodes)))

    def alone(self) -> AbstractContextManager[Any]:
        """Inside, nothing is sent."""
        return collectives.Alone() if self.sends else nullcontext()

    @property
    def plain_names(self) -> tuple[str, ...]:
        """What PyTorch's own choice saves."""
        return self._code.made[None].chosen

    @property
    def key(self) -> str:
        """Of what earlier runs know."""
        numbers = self.sizes.numbers
        return hashlib.sha256(repr((self._code.key, numbers)).encode()).hexdigest()[:32] if numbers else self._code.key

    @property
    def input_specs(self) -> dict[int, BufferSpec]:
        """Of the inputs that are no parameters, by position."""
        return {i: sample.spec for i, sample in self._others.items()}

    @property
    def roundings(self) -> int:
        """Values of less than single precision that a step computes: fused code may round them or not."""
        assert self._code.nodes is not None
        return self._code.nodes.at(self.sizes).roundings

    def sample_inputs(self, *, as_trained: bool = False, other: bool = False) -> list[Any]:
        """Inputs like the captured ones: the layer's own parameters, sizes, random numbers for what has a gradient.

        The memory of a parameter that is sharded is there during its layer's call alone: then it is random too.

        Args:
            as_trained: With values that are not special, as zeros and ones of a start are.
            other: With values of other calls where an input has no gradient.
        """
        made: list[Any] = []
        numbers = dict(zip(self._symbols, self.sizes.numbers, strict=True))
        for i in range(len(self._fakes)):
            found = self.parameters.get(i)
            if i in numbers:
                made.append(numbers[i])
            elif i in self._objects:
                made.append(self._objects[i])
            elif found is None:
                sample = self._others[i]
                made.append(sample.tensor(other=other or (as_trained and sample.is_constant)))
            elif part_of(found).untyped_storage().size() < self._parameter_samples[i].spec.bytes:
                made.append(self._parameter_samples[i].tensor())
            else:
                made.append(samples.as_trained(found) if as_trained else found)
        return made

    def variant(self, name: str, saved: SavedSet | None, *, kernels: bool = True) -> Variant:
        """Compile the layer so that it saves ``saved``; None: as PyTorch does, which also makes ``layer``.

        Args:
            kernels: Have the compiler start on them. False: only make the code and read it, which takes a second; no
                kernel is compiled.

        Raises:
            UnreadableCodeError: the code has an unknown form, so what it takes is unknown.
            PlanMismatchError: the layer does not have what the plan saves.
            UnsupportedModelError: it is no pair of a forward and a backward, or is made by a setting that hides it.
        """
        from torch._inductor import config as inductor_config

        if self.device.type != "cpu" and inductor_config.triton.cudagraphs:
            raise UnsupportedModelError(
                'Inductor\'s setting triton.cudagraphs is on, as under mode="reduce-overhead". CUDA graphs keep memory '
                "of their own, which no plan counts. Switch it off: torch._inductor.config.triton.cudagraphs = False, "
                "or unset TORCHINDUCTOR_CUDAGRAPHS."
            )
        if inductor_config.cpp_wrapper:
            raise UnsupportedModelError(
                "Inductor's setting cpp_wrapper is on. Its code is then C++ from end to end, and what that allocates "
                "cannot be read. Switch it off: torch._inductor.config.cpp_wrapper = False, or unset "
                "TORCHINDUCTOR_CPP_WRAPPER."
            )
        names = None if saved is None else tuple(sorted(saved.names or ()))
        if names in self._code.refused:
            raise self._code.refused[names]
        made = self._code.made.get(names)
        if made is None:
            made = self._code.made[names] = self._made(names)
        if kernels:
            made.kernels.begin()
        if not all(map(self.sizes.meet, made.holds_for)):
            raise UnreadableCodeError(f"its code holds for other sizes: {' and '.join(map(str, made.holds_for))}.")
        assert self._code.nodes is not None
        if self.layer is None:
            self.layer = layer_graph(self._code.nodes.at(self.sizes), self.device)
        if saved is None:
            storages = {n: s for s, n in self.layer.names.items()}
            stored = sum(self.layer.graph.storages[storages[n]].bytes for n in made.chosen if n in storages)
            saved = SavedSet(None, stored, 0, 0, 0.0)
        run = made.run if kernels else None
        read = self._read(made.lowered)
        other_order = "" if made.adds_up_alike or not self.roundings else OTHER_ORDER
        return Variant(
            name, saved, read.memory, run, code_ms=read.forward_ms + read.backward_ms, refused=other_order,
            holds_for=made.holds_for, kernels=made.kernels, sources=_sources(made.lowered),
        )  # fmt: skip

    def _made(self, names: tuple[str, ...] | None) -> _Made:
        lowered: list[_Lowered] = []
        chosen: list[str] = []
        code = self._code

        def seen(graph: fx.Graph, info: Any, values: list[fx.Node], num_outputs: int) -> None:
            chosen[:] = _made_in_forward(values)
            if code.nodes is None:
                code.nodes = JointNodes(graph, info.is_required_fw, num_outputs, self.sizes)
                code.num_outputs = num_outputs
                code.draws = any(map(draws, code.nodes.nodes))
                code.sends = bool(collectives.sent_by(graph))
                _check_known(graph)
                code.key = layer_digest(graph, *self._settings)

        later = KernelsLater(None if names is None else code.made[None].kernels)
        try:
            with self._new_conditions() as conditions, later.held():
                run = self._compile(PlannedPartitioner(names, seen), lowered, reuse=names is None)
        except UnreadableCodeError as error:
            code.refused[names] = error
            raise
        if code.nodes is None or len(lowered) != 2:
            raise UnsupportedModelError(
                f"a compiled layer became {len(lowered)} compiled graphs, not a forward and a backward. "
                "Nothing in it needs a gradient, or it runs without gradients."
            )
        if names is not None:
            self._check_order(names, lowered)
        alike = names is None or add_up_alike(_sources(code.made[None].lowered), _sources(lowered))
        return _Made(run, lowered, tuple(chosen), later, tuple(conditions), alike)

    def _check_order(self, names: tuple[str, ...], lowered: Sequence[_Lowered]) -> None:
        """Raises: UnreadableCodeError: ranks that run the plain code would wait for others than this one sends."""
        plain = {one.backward: one.sent for one in self._code.made[None].lowered}
        if any(one.sent != plain[one.backward] for one in lowered):
            self._code.refused[names] = UnreadableCodeError(
                "its code sends other values between ranks than the plain layer, or in another order."
            )
            raise self._code.refused[names]

    @contextmanager
    def _new_conditions(self) -> Iterator[list[Any]]:
        """Conditions on sizes that code which is made inside takes for granted, and that Dynamo does not check: it has
        ended by then.

        Raises:
            UnreadableCodeError: the code would be for one size, at the end.
        """
        found: list[Any] = []
        mode = self._context.fake_mode
        environment: Any = None if mode is None else mode.shape_env
        if not self._symbols or environment is None or not environment.frozen:
            yield found
            return
        if self._code.num_checked < 0:
            self._code.num_checked = len(environment.guards)
        kept = environment.replacements, environment.var_to_range
        before = [dict(one) for one in kept]
        yield found
        if not environment.replacements.keys().isdisjoint(self._symbols.values()):  # which other variants still have
            for one, values in zip(kept, before, strict=True):
                one.clear()
                one.update(values)
            environment._update_version_counter()
            raise UnreadableCodeError("its code is for one size only.")
        # All since then: what one compilation has asked for, the next one takes as known.
        found += [guard.expr for guard in environment.guards[self._code.num_checked :]]

    def compiled(self, read: Variant) -> Variant:
        """``read`` so that it can run, once its kernels are compiled."""
        return self.run_again(read.name) if read.runs_again else self.variant(read.name, read.saved)

    def run_again(self, name: str) -> Variant:
        """The layer as PyTorch compiles it, storing nothing: backward runs it again as a whole."""
        plain, layer = self._code.made[None], self.layer
        assert layer is not None
        run, lowered = plain.run, plain.lowered
        read = self._read(lowered)
        once, held = read.memory, self._read(lowered, holds_given=True).memory
        kept = once.stored_bytes + once.saved_output_bytes
        state = state_bytes(self.device) if self.draws else 0
        memory = VariantMemory(
            stored_bytes=state,
            forward_peak_bytes=once.forward_peak_bytes + state,
            forward_end_bytes=once.forward_end_bytes - once.stored_bytes + state,
            backward_peak_bytes=max(once.forward_peak_bytes, kept + held.backward_peak_bytes) + state,
            backward_end_bytes=once.backward_end_bytes + kept - state,
        )
        forward_ms = sum(layer.costs.op_ms[: layer.turn_op])
        saved = SavedSet(None, 0, memory.forward_peak_bytes, memory.backward_peak_bytes, forward_ms)
        again = storing_inputs_only(run, draws=self.device if self.draws else None)
        code_ms = 2 * read.forward_ms + read.backward_ms
        return Variant(
            name, saved, memory, again, code_ms=code_ms, runs_again=True, kernels=plain.kernels,
            sources=_sources(lowered),
        )  # fmt: skip

    def pytorchs_sets(self) -> list[SavedSet]:
        """What PyTorch saves under each of its memory budgets, the least first, of a layer that has been compiled once;
        none where its code would be for one size.

        Its rules know what Inductor fuses; the solver adds up ops. So each of the two finds what the other misses.
        """
        choices, nodes = BudgetedChoices(), self._code.nodes
        assert nodes is not None and self.layer is not None
        try:
            with self._new_conditions(), suppress(ChoicesFoundError):
                self._compile(choices, [], reuse=False)
        except UnreadableCodeError:
            return []
        by_name = {node.name: node for node in nodes.nodes}
        found = []
        for names in [tuple(sorted(_made_in_forward(values))) for values in choices.found]:
            saved = saving(self.layer, [base_of(by_name[name]).name for name in names])
            found.append(replace(saved, names=names))  # of a view too: then the code is what PyTorch makes
        return found

    def inference(self) -> Compiled:
        """The layer compiled for calls without gradients, as PyTorch does."""
        return self._compile(None, [], reuse=True)

    def _compile(
        self, partitioner: PlannedPartitioner | BudgetedChoices | None, lowered: list[_Lowered], *, reuse: bool
    ) -> Compiled:
        from torch._functorch import config as functorch_config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
            placeholders, sent = _placeholders(gm), collectives.sent_by(gm.graph)
            made = compile_fx_inner(gm, example_inputs, **options)
            backward = bool(options.get("is_backward"))
            lowered.append(_Lowered(placeholders, made.source_code, backward, _results(gm), sent))
            return made

        patches: dict[str, Any] = {"allow_buffer_reuse": reuse}
        if self._round_as_eager:
            patches["emulate_precision_casts"] = True
        if partitioner is not None:
            patches["custom_partitioner_fn"] = partitioner
        # Backward is otherwise lowered when it first runs, under other settings. PyTorch's cache of whole functions
        # would hand out code whose text is not there to be read; compiled kernels and graphs are cached all the same.
        functorch = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
        ambient = self.ambient.entered() if partitioner is not None else nullcontext()
        trace = self._code.trace.reused() if partitioner is not None else nullcontext()
        with ambient, trace, tracing(self._context), functorch_config.patch(functorch):
            return compile_fx(
                copy.deepcopy(self._graph), list(self._fakes), inner_compile=inner, config_patches=patches
            )

    def _read(self, lowered: list[_Lowered], *, holds_given: bool = False) -> _Read:
        """What its code says. ``holds_given``: inputs and gradients are held elsewhere until backward has ended."""
        ahead = next(x for x in lowered if not x.backward)
        back = next(x for x in lowered if x.backward)
        specs = {name: _spec(value, self.sizes) for name, value in back.placeholders.items()}
        inputs = {name: InputMemory(_spec(value, self.sizes), name) for name, value in ahead.placeholders.items()}
        read = partial(
            read_code, workspace=partial(op_rates.workspace_bytes, device=self.device), device_type=self.device.type,
            prices=op_rates.prices(self.device),
        )  # fmt: skip
        forward = read(ahead.source, inputs)
        taken = [i for i, fake in enumerate(self._fakes) for _ in range(num_parts(fake))]
        positions = dict(zip(ahead.placeholders, taken, strict=False))
        returned = set(forward.returned[: self._code.num_outputs])
        stored = list(forward.returned[self._code.num_outputs :])
        sizes = [name for name, spec in specs.items() if not isinstance(spec, BufferSpec | str)]
        stored = [None] * len(sizes) + stored[: len(stored) - len(sizes)]  # backward takes sizes first
        held = list(specs)[: len(stored)]
        if len(forward.returned) != ahead.results:
            raise UnreadableCodeError(f"generated code returns {len(forward.returned)} values, not {ahead.results}.")
        given: dict[str, InputMemory] = {}
        for name, block in zip(held, stored, strict=False):
            spec = specs[name]
            if isinstance(block, str):  # an input of the layer
                position = positions[block]
                sample = self._others.get(position)
                # Parameters stay. Another input goes with the layer, where a gradient flows on through it.
                goes = sample is not None and sample.requires_grad and not holds_given
                given[name] = InputMemory(spec, block, sample.spec.bytes if sample and goes else 0)
            else:
                size = 0 if block in returned else forward.block_bytes.get(block, 0) if block is not None else 0
                given[name] = InputMemory(spec, block, size)
        for name in list(specs)[len(stored) :]:  # gradients
            spec = specs[name]
            size = spec.bytes if isinstance(spec, BufferSpec) and not holds_given else 0
            given[name] = InputMemory(spec, name, size)
        backward = read(back.source, given)
        kept = {b for b in stored if isinstance(b, int)}
        memory = VariantMemory(
            stored_bytes=sum(forward.block_bytes[b] for b in kept - returned),
            forward_peak_bytes=forward.peak_bytes,
            forward_end_bytes=forward.end_bytes,
            backward_peak_bytes=backward.peak_bytes,
            backward_end_bytes=backward.end_bytes,
            saved_output_bytes=sum(forward.block_bytes[b] for b in kept & returned),
        )
        return _Read(memory, forward.ms, backward.ms)


def _sources(lowered: Sequence[_Lowered]) -> tuple[str, str]:
    """Code of the forward, and of the backward."""
    forward, backward = sorted(lowered, key=lambda one: one.backward)
    return forward.source, backward.source


def _made_in_forward(values: Sequence[fx.Node]) -> list[str]:
    """Of what is saved, by name: neither inputs nor sizes."""
    return [n.name for n in values if n.op != "placeholder" and not is_size(n)]


def _settings() -> tuple[str, str]:
    """Digests of the settings under which code is generated."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    return inductor_config.get_hash().hex(), functorch_config.get_hash().hex()


def _placeholders(gm: fx.GraphModule) -> dict[str, Any]:
    return {str(node.target): node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"}


def _spec(value: Any, sizes: Sizes) -> BufferSpec | int | str | None:
    """What generated code is given for a placeholder."""
    if isinstance(value, torch.Tensor):
        return BufferSpec.of(value, sizes)
    if _is_opaque(value):
        return OPAQUE
    return sizes.of(value) if isinstance(value, torch.SymInt) else None


def _is_opaque(value: object) -> bool:
    """Whether it is an object that graphs only hand on, as the mesh of a DTensor."""
    return isinstance(value, FakeScriptObject)


def _results(gm: fx.GraphModule) -> int:
    returned = next(n for n in reversed(gm.graph.nodes) if n.op == "output").args[0]
    return len(returned) if isinstance(returned, (list, tuple)) else 1


def _check_known(graph: fx.Graph) -> None:
    if unknown := collectives.unknown_in(graph):
        raise UnsupportedModelError(
            f"a compiled layer sends between ranks by {unknown}, which lowtide.compile does not know. Use "
            "lowtide.fit, which plans such layers."
        )


def device_of(values: Sequence[Any]) -> torch.device:
    """The accelerator that the first of ``values`` lies on that lies on one; else the CPU."""
    devices = (t.device for t in values if isinstance(t, torch.Tensor))
    return next(filter(is_accelerator, devices), torch.device("cpu"))
