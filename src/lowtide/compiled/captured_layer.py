"""One layer as Dynamo captured it: its graph and inputs, kept so that it can be compiled in several ways, and later."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._guards import TracingContext, tracing

from lowtide.compiled import op_rates
from lowtide.compiled.ambient import Ambient
from lowtide.compiled.generated_code import BufferSpec, InputMemory, UnreadableCodeError, VariantMemory, read_code
from lowtide.compiled.joint_nodes import JointNodes
from lowtide.compiled.known_variants import layer_digest
from lowtide.compiled.layer_graph import LayerGraph, layer_graph
from lowtide.compiled.partitioner import PlannedPartitioner, draws
from lowtide.compiled.saved_sets import SavedSet
from lowtide.compiled.whole_rerun import storing_inputs_only
from lowtide.device.generators import state_bytes
from lowtide.device.names import device_name, is_accelerator
from lowtide.errors import UnsupportedModelError
from lowtide.step.subclasses import is_of_ranks

Compiled = Callable[..., Sequence[Any]]


@dataclass
class Variant:
    """One way to compile a layer.

    Attributes:
        name: ``plain`` for PyTorch's own.
        saved: What it saves besides inputs; None: PyTorch's own choice.
        memory: Read from its code.
        run: The compiled function; None while only its code has been read.
        step_ms: Forward and backward of one layer, measured, perhaps by an earlier run; 0 before.
        refused: Why it is not used; "" where nothing speaks against it.
        runs_again: It is the plain one, whose forward backward runs again as a whole.
    """

    name: str
    saved: SavedSet
    memory: VariantMemory
    run: Compiled | None = None
    step_ms: float = 0.0
    refused: str = ""
    runs_again: bool = False

    @property
    def is_tried(self) -> bool:
        """It has run, in this run or an earlier one."""
        return self.run is not None or self.step_ms > 0


@dataclass(frozen=True)
class _Lowered:
    """A graph that Inductor has made code of."""

    placeholders: dict[str, BufferSpec | None]
    source: str
    backward: bool
    results: int


class CapturedLayer:
    """What Dynamo handed to the backend for one layer and one set of input shapes.

    Args:
        graph: Dynamo's graph.
        inputs: What it was called with; parameters are kept, others only described.
        round_as_eager: Values of low precision are rounded inside fused kernels too.
    """

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any], *, round_as_eager: bool = False) -> None:
        self._round_as_eager = round_as_eager
        context = TracingContext.try_get()
        assert context is not None, "Dynamo calls a backend while it traces"
        self._graph, self._context = graph, context
        _check_sends_nothing(inputs)
        self.device = device_of(inputs)
        self.ambient = Ambient.now(self.device.type)
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        self._fakes = [n.meta.get("example_value", given) for n, given in zip(placeholders, inputs, strict=True)]
        if any(not isinstance(f, torch.Tensor) for f in self._fakes):
            raise UnsupportedModelError(
                "a compiled layer takes a number that changes between calls. lowtide.compile plans fixed sizes only: "
                "pad the batches to a few lengths."
            )
        self.parameters = {i: t for i, t in enumerate(inputs) if isinstance(t, nn.Parameter)}
        self._parameter_specs = {i: BufferSpec.of(t) for i, t in self.parameters.items()}
        self._others = {i: _Sample.of(t) for i, t in enumerate(inputs) if i not in self.parameters}
        self.layer: LayerGraph | None = None
        self.draws = False
        self.plain_names: tuple[str, ...] = ()  # what PyTorch's own choice saves
        self.key = ""  # of what earlier runs know
        self._settings = (str(self.device), device_name(self.device), self.ambient, round_as_eager, _settings())
        self._plain: tuple[Compiled, list[_Lowered]] | None = None
        self._num_outputs = 0

    @property
    def input_specs(self) -> dict[int, BufferSpec]:
        """Of the inputs that are no parameters, by position."""
        return {i: sample.spec for i, sample in self._others.items()}

    def sample_inputs(self) -> list[torch.Tensor]:
        """Inputs like the captured ones: the layer's own parameters, random numbers for the rest.

        The memory of a parameter that is sharded is there during its layer's call alone: then it is random too.
        """
        made: list[torch.Tensor] = []
        for i in range(len(self._fakes)):
            found = self.parameters.get(i)
            if found is None:
                made.append(self._others[i].tensor())
            elif found.untyped_storage().size() < self._parameter_specs[i].bytes:
                made.append(_random(self._parameter_specs[i], found.device, found.requires_grad))
            else:
                made.append(found)
        return made

    def variant(self, name: str, saved: SavedSet | None, *, kernels: bool = True) -> Variant:
        """Compile the layer so that it saves ``saved``; None: as PyTorch does, which also makes ``layer``.

        Args:
            kernels: False: only make the code and read it, which takes a second; no kernel is compiled.

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
        lowered: list[_Lowered] = []
        chosen: list[str] = []

        def seen(graph: fx.Graph, info: Any, values: list[fx.Node]) -> None:
            chosen[:] = [n.name for n in values if n.op != "placeholder"]
            if self.layer is None:
                nodes = JointNodes(graph, info.is_required_fw, self._num_outputs)
                self.draws = any(map(draws, nodes.nodes))
                self.key = layer_digest(graph, *self._settings)
                self.layer = layer_graph(nodes, self.device)

        partitioner = _CountingPartitioner(None if saved is None else saved.names, seen, self)
        run = self._compile(partitioner, lowered, kernels=kernels, reuse=saved is None)
        if self.layer is None or len(lowered) != 2:
            raise UnsupportedModelError(
                f"a compiled layer became {len(lowered)} compiled graphs, not a forward and a backward. "
                "Nothing in it needs a gradient, or it runs without gradients."
            )
        if saved is None:
            made = {n: s for s, n in self.layer.names.items()}
            stored = sum(self.layer.graph.storages[made[n]].bytes for n in chosen if n in made)
            saved = SavedSet(None, stored, 0, 0, 0.0)
            self.plain_names = tuple(n for n in chosen if n in made)
            self._plain = run, lowered
        return Variant(name, saved, self._memory(lowered), run if kernels else None)

    def run_again(self, name: str) -> Variant:
        """The layer as PyTorch compiles it, storing nothing: backward runs it again as a whole."""
        assert self._plain is not None, "the plain variant is made first"
        run, lowered = self._plain
        once, held = self._memory(lowered), self._memory(lowered, holds_given=True)
        kept = once.stored_bytes + once.saved_output_bytes
        state = state_bytes(self.device) if self.draws else 0
        memory = VariantMemory(
            stored_bytes=state,
            forward_peak_bytes=once.forward_peak_bytes + state,
            forward_end_bytes=once.forward_end_bytes - once.stored_bytes + state,
            backward_peak_bytes=max(once.forward_peak_bytes, kept + held.backward_peak_bytes) + state,
            backward_end_bytes=once.backward_end_bytes + kept - state,
        )
        saved = SavedSet(None, 0, memory.forward_peak_bytes, memory.backward_peak_bytes, 0.0)
        again = storing_inputs_only(run, draws=self.device if self.draws else None)
        return Variant(name, saved, memory, again, runs_again=True)

    def inference(self) -> Compiled:
        """The layer compiled for calls without gradients, as PyTorch does."""
        return self._compile(None, [], kernels=True, reuse=True)

    def _compile(
        self, partitioner: PlannedPartitioner | None, lowered: list[_Lowered], *, kernels: bool, reuse: bool
    ) -> Compiled:
        from torch._functorch import config as functorch_config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
            made = compile_fx_inner(gm, example_inputs, **options)
            lowered.append(_Lowered(_specs(gm), made.source_code, bool(options.get("is_backward")), _results(gm)))
            return made

        patches: dict[str, Any] = {"allow_buffer_reuse": reuse}
        if self._round_as_eager:
            patches["emulate_precision_casts"] = True
        if partitioner is not None:
            patches["custom_partitioner_fn"] = partitioner
        if not kernels:
            patches["fx_graph_cache"] = False
        # Backward is otherwise lowered when it first runs, under other settings. PyTorch's cache of whole functions
        # would hand out code whose text is not there to be read; compiled kernels and graphs are cached all the same.
        functorch = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
        ambient = self.ambient.entered() if partitioner is not None else nullcontext()
        with ambient, tracing(self._context), functorch_config.patch(functorch), _kernels_compiled(kernels):
            return compile_fx(
                copy.deepcopy(self._graph), list(self._fakes), inner_compile=inner, config_patches=patches
            )

    def _memory(self, lowered: list[_Lowered], *, holds_given: bool = False) -> VariantMemory:
        """By its code. ``holds_given``: inputs and gradients are held elsewhere until backward has ended."""
        ahead = next(x for x in lowered if not x.backward)
        back = next(x for x in lowered if x.backward)
        inputs = {name: InputMemory(spec, name) for name, spec in ahead.placeholders.items()}
        read = partial(
            read_code, workspace=partial(op_rates.workspace_bytes, device=self.device), device_type=self.device.type
        )
        forward = read(ahead.source, inputs)
        positions = {name: i for i, name in enumerate(ahead.placeholders)}
        returned = set(forward.returned[: self._num_outputs])
        stored = forward.returned[self._num_outputs :]
        held = list(back.placeholders)[: len(stored)]
        if len(forward.returned) != ahead.results:
            raise UnreadableCodeError(f"generated code returns {len(forward.returned)} values, not {ahead.results}.")
        given: dict[str, InputMemory] = {}
        for name, block in zip(held, stored, strict=False):
            spec = back.placeholders[name]
            if isinstance(block, str):  # an input of the layer
                position = positions[block]
                sample = self._others.get(position)
                # Parameters stay. Another input goes with the layer, where a gradient flows on through it.
                goes = sample is not None and sample.requires_grad and not holds_given
                given[name] = InputMemory(spec, block, sample.spec.bytes if sample and goes else 0)
            else:
                size = 0 if block in returned else forward.block_bytes.get(block, 0) if block is not None else 0
                given[name] = InputMemory(spec, block, size)
        for name in list(back.placeholders)[len(stored) :]:  # gradients
            spec = back.placeholders[name]
            given[name] = InputMemory(spec, name, spec.bytes if spec and not holds_given else 0)
        backward = read(back.source, given)
        kept = {b for b in stored if isinstance(b, int)}
        return VariantMemory(
            stored_bytes=sum(forward.block_bytes[b] for b in kept - returned),
            forward_peak_bytes=forward.peak_bytes,
            forward_end_bytes=forward.end_bytes,
            backward_peak_bytes=backward.peak_bytes,
            backward_end_bytes=backward.end_bytes,
            saved_output_bytes=sum(forward.block_bytes[b] for b in kept & returned),
        )


class _CountingPartitioner(PlannedPartitioner):
    """Notes how many values the layer returns, which only the partitioner gets."""

    def __init__(self, saved: Sequence[str] | None, seen: Any, captured: CapturedLayer) -> None:
        super().__init__(saved, seen)
        self._captured: CapturedLayer | None = captured

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_captured": None}

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
        if self._captured is not None:
            self._captured._num_outputs = int(options["num_fwd_outputs"])
        return super().__call__(gm, joint_inputs, **options)


@dataclass(frozen=True)
class _Sample:
    """How to make an input like the one seen: random where it is of floating point, a copy of its bits elsewhere."""

    spec: BufferSpec
    requires_grad: bool
    device: torch.device
    copy: torch.Tensor | None  # on the host: the device's memory is the step's

    @staticmethod
    def of(tensor: torch.Tensor) -> _Sample:
        kept = None if tensor.dtype.is_floating_point else tensor.detach().to("cpu", copy=True)
        return _Sample(BufferSpec.of(tensor), tensor.requires_grad, tensor.device, kept)

    def tensor(self) -> torch.Tensor:
        if self.copy is not None:
            return self.copy.to(self.device, copy=True)
        return _random(self.spec, self.device, self.requires_grad)


def _random(spec: BufferSpec, device: torch.device, requires_grad: bool) -> torch.Tensor:
    # What has no gradient may be a variance, and is positive.
    draw = torch.randn if requires_grad else torch.rand
    memory = draw(spec.bytes // spec.dtype.itemsize, device=device).to(spec.dtype)
    return memory.as_strided(spec.size, spec.stride).requires_grad_(requires_grad)


def _settings() -> tuple[str, str]:
    """Digests of the settings under which code is generated."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    return inductor_config.get_hash().hex(), functorch_config.get_hash().hex()


def _specs(gm: fx.GraphModule) -> dict[str, BufferSpec | None]:
    found = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            found[str(node.target)] = BufferSpec.of(value) if isinstance(value, torch.Tensor) else None
    return found


def _results(gm: fx.GraphModule) -> int:
    returned = next(n for n in reversed(gm.graph.nodes) if n.op == "output").args[0]
    return len(returned) if isinstance(returned, (list, tuple)) else 1


@contextmanager
def _kernels_compiled(wanted: bool) -> Iterator[None]:
    """Whether kernels of C++ and Triton are compiled; without, the made code can be read and not run."""
    if wanted:
        yield
        return
    from torch._inductor.async_compile import AsyncCompile

    with (
        patch.object(AsyncCompile, "cpp_pybinding", lambda self, *args, **kwargs: _not_compiled),
        patch.object(AsyncCompile, "triton", lambda self, *args, **kwargs: _not_compiled),
    ):
        yield


def _check_sends_nothing(inputs: Sequence[Any]) -> None:
    if any(is_of_ranks(t) for t in inputs if isinstance(t, torch.Tensor)):
        raise UnsupportedModelError(
            "a compiled layer takes DTensors, as under tensor parallelism. Its code sends between ranks, and each rank "
            "would choose for itself when to try a variant. Use lowtide.fit, which plans such layers."
        )


def device_of(values: Sequence[Any]) -> torch.device:
    """The accelerator that the first of ``values`` lies on that lies on one; else the CPU."""
    devices = (t.device for t in values if isinstance(t, torch.Tensor))
    return next(filter(is_accelerator, devices), torch.device("cpu"))


def _not_compiled(*args: Any) -> None:
    raise AssertionError("this code was made to be read, not to run")
