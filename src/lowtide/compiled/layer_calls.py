"""Calls of compiled layers: Dynamo's backend for them, and which variant runs in which layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import is_in_any_mode_without_ignore_compile_internals

from lowtide.compiled.captured_layer import CapturedLayer, Compiled, Variant
from lowtide.compiled.choice import called
from lowtide.compiled.generated_code import UnreadableCodeError
from lowtide.compiled.known_variants import KnownVariant, KnownVariants
from lowtide.compiled.memory_between_layers import MemoryBetweenLayers, mark
from lowtide.compiled.proof import why_not_equal
from lowtide.compiled.saved_sets import SavedSet, front, least, least_peak, saving, within_peak
from lowtide.errors import LowtideError, PlanMismatchError, UnsupportedModelError
from lowtide.step.batches import batch_tensors
from lowtide.step.module_calls import is_pytorchs_own
from lowtide.step.subclasses import is_sharded
from lowtide.units import format_bytes

PLAIN, LEAST, AGAIN = "plain", "least", "run again"
_CORRECTIONS, _NEAR = 4, 0.02  # of the limit
_MOST_SHAPES = 16  # that one kind of layer is compiled for
_SAMPLES_AT_OTHER_SIZES = 8  # at most: the same code was proven at the sizes of its plan
SEEN_BY_A_MODE = (
    "a dispatch mode was on, such as FlopCounterMode, from which compiled code hides its ops: layers ran as they are, "
    "without a plan"
)
_AS_IT_IS = "which is not compiled but runs as it is: no plan counts what it stores"


class Session(threading.local):
    """What runs now, on this thread."""

    layer = ""
    variants: Mapping[str, str] = {}  # by layer
    shapes: Mapping[str, LayerShape] = {}  # by layer, of which the variants are
    watch: MemoryBetweenLayers | None = None
    limit: int | float | None = None  # of the step that is watched: bytes beyond what lives throughout, or of plain
    ran: tuple[LayerShape, Variant] | None = None
    compiled_now = False
    seen_by_a_mode = False  # in this step, layers ran uncompiled
    not_as_planned = ""  # why a layer of this step does not run what is planned
    training = False  # steps have been planned: an error would end a run, and lose its work

    def enter(self, layer: str) -> None:
        """``layer`` begins: what ran before is forgotten."""
        self.layer, self.ran, self.compiled_now = layer, None, False


class LayerShape:
    """One kind of layer at one set of input shapes: its variants, of which each layer runs one.

    Args:
        other: The same graph at other sizes. What is compiled for those serves these too.

    Attributes:
        variants: By name; ``plain`` and ``run again`` are always there.
        proposed: By name, what the solver proposes and has no code yet.
        pytorchs: What PyTorch saves under each of its memory budgets, the least first, once that is proposed.
        unreadable: By the names that are saved, why their code is not used.
        whole: It is the model as one graph. Then the peak of its forward and backward counts, not what it holds while
            others run.
    """

    def __init__(
        self, captured: CapturedLayer, session: Session, *, whole: bool = False, other: LayerShape | None = None
    ) -> None:
        self.captured, self._session, self.whole = captured, session, whole
        plain = captured.variant(PLAIN, None)
        assert captured.layer is not None
        self.known = KnownVariants(captured.key)
        again = captured.run_again(AGAIN)
        self.variants: dict[str, Variant] = {PLAIN: plain, AGAIN: again}
        for name, found in self.known.variants.items():
            if name in self.variants:
                self.variants[name].take_time_of(found)
            else:
                self.variants[name] = Variant(
                    name, found.saved, found.memory, None, found.step_ms, found.error, found.code_ms, found.refused
                )
        self.proposed: dict[str, SavedSet] = {}
        self.pytorchs: list[SavedSet] = []
        self.unreadable: dict[tuple[str, ...] | None, str] = {}
        self._other, self._has_front = other, False
        if captured.sends:
            again.refused = "it would send between ranks again"
            self.make_least()
        elif whole:
            again.run = None  # it peaks like the plain graph: that is for where the leanest has other bits
            self._make_first()
        else:  # the first step runs the plain code again, which needs no kernels more
            (again.refused,) = why_not_equal(captured, [again], plain)
        for name, ready in {} if other is None else other.variants.items():
            if name not in self.variants and ready.run is not None and ready.saved.names is not None:
                self.proposed[name] = saving(captured.layer, ready.saved.names)

    def _make_first(self) -> None:
        """Of a model as one graph, what the watched step runs.

        That is the plain graph, or the set that a plan will likely save, where these stay within the limit as far
        as the graph alone says. Else it is the leanest set.
        """
        plain, limit = self.variants[PLAIN], self._limit_bytes
        if limit is None or self._step_bytes(plain) <= limit:
            return
        if self.captured.returns_loss:  # else what comes after the graph may take as much again
            self.read_near(limit, self._step_bytes, self.captured.gradient_bytes)
            own = (v for v in self.variants.values() if v.saved.names is not None and not v.refused)
            within = [v for v in own if self._step_bytes(v) <= limit]
            if within:
                found = max(within, key=self._step_bytes)
                first = self.variants[found.name] = self.captured.compiled(found)
                (first.refused,) = why_not_equal(self.captured, [first], plain)
                if first.memory == found.memory:
                    first.take_time_of(found)
                if not first.refused and self._step_bytes(first) <= limit:
                    return
        self.make_least()

    @property
    def _limit_bytes(self) -> int | None:
        """Of a step of the model as one graph that is watched."""
        limit = self._session.limit
        return int(limit * self._step_bytes(self.variants[PLAIN])) if isinstance(limit, float) else limit

    def _step_bytes(self, variant: Variant) -> int:
        """Peak of a step of the model as one graph, as far as its code says: backward begins with gradients of all that
        forward has returned, zeros among them, and nobody else holds that still."""
        memory = variant.memory
        begin_bytes = memory.stored_bytes + memory.saved_output_bytes + self.captured.gradient_bytes
        return max(memory.forward_peak_bytes, begin_bytes + memory.backward_peak_bytes)

    def make_least(self) -> bool:
        """Propose the leanest variant; compile and prove it where first steps run it. Whether it was missing.

        Raises:
            UnreadableCodeError, PlanMismatchError: it cannot be made, and there is no plan yet. Later it is left out.
        """
        captured, plain, known = self.captured, self.variants[PLAIN], self.variants.get(LEAST)
        is_run_first = self.whole or captured.sends
        if LEAST in self.proposed or (known is not None and (known.run is not None or not is_run_first)):
            return False
        saved = self._least_set() if known is None else known.saved
        if saved.names in self.unreadable:
            return False
        if not is_run_first:
            self.proposed[LEAST] = saved
            return True
        try:
            least = self.variants[LEAST] = captured.variant(LEAST, saved)
        except (UnreadableCodeError, PlanMismatchError) as error:
            if not self._session.training:
                raise
            self.unreadable[saved.names] = f"{LEAST}: {error}"
            return False
        if known is not None and known.memory == least.memory:
            least.take_time_of(known)
        (least.refused,) = why_not_equal(captured, [least], plain)
        if least.refused and not captured.sends:
            again = self.variants[AGAIN] = captured.run_again(AGAIN)
            (again.refused,) = why_not_equal(captured, [again], plain)
        return True

    def _least_set(self) -> SavedSet:
        layer, other = self.captured.layer, self._other
        assert layer is not None
        if other is not None and LEAST in other.variants:
            return saving(layer, other.variants[LEAST].saved.names or ())
        return least_peak(layer) if self.whole else least(layer)

    def propose_front(self) -> None:
        """Propose, once, what holds for any limit: sets along the trade-off, and PyTorch's own."""
        if self._has_front:
            return
        self._has_front = True
        assert self.captured.layer is not None
        self.propose(front(self.captured.layer))
        if not self.captured.sends:  # else what ranks send is saved, whatever it costs
            self.pytorchs = self.captured.pytorchs_sets()
            self.propose(self.pytorchs)

    def propose(self, sets: Sequence[SavedSet]) -> bool:
        """Add the sets that are new. Whether there were any."""
        known = {v.saved.names for v in self.variants.values()} | {s.names for s in self.proposed.values()}
        new = {s.names: s for s in sets if s.names not in known | self.unreadable.keys()}
        for saved in new.values():
            name = f"saving {len(saved.names or ())} values, {format_bytes(saved.stored_bytes)}"
            while name in self.variants or name in self.proposed:
                name += "'"
            self.proposed[name] = saved
        return bool(new)

    def name_of(self, saved: SavedSet) -> str:
        """Of the variant that saves the same values; "" if there is none, or it is not used."""
        sets = {name: v.saved for name, v in self.variants.items() if not v.refused} | self.proposed
        return next((name for name, s in sets.items() if s.names == saved.names), "")

    def read(self, name: str) -> None:
        """Make the code of a proposed variant, and read it."""
        saved = self.proposed.pop(name)
        try:
            self.variants[name] = self.captured.variant(name, saved, kernels=False)
        except (UnreadableCodeError, PlanMismatchError) as error:
            self.unreadable[saved.names] = f"{name}: {error}"

    def read_near(self, limit: int, step_peak: Callable[[Variant], int], rest_bytes: int = 0) -> Variant | None:
        """Read the code of a set whose step comes close to the limit from below, where this is most of the step.

        Ask for the fastest set within the limit, read its code, and ask again for as much less or more as that took
        more or less: simulation fuses otherwise than Inductor, and the step holds what is not in the graph.

        Args:
            step_peak: Of a step with that variant, by its code.
            rest_bytes: As of ``within_peak``.
        """
        assert self.captured.layer is not None

        def near() -> Variant | None:
            own = (v for v in self.variants.values() if v.saved.names is not None and not v.refused)
            return next((v for v in own if 0 <= limit - step_peak(v) <= _NEAR * limit), None)

        known = [(step_peak(v), v.saved.peak_bytes) for v in self.variants.values() if v.saved.names is not None]
        near_bytes, asked_bytes = min(known, key=lambda peaks: abs(peaks[0] - limit), default=(0, 0))
        ask, asked = limit - near_bytes + asked_bytes, set[int]()
        while near() is None and ask not in asked and len(asked) < _CORRECTIONS:
            asked.add(ask)
            saved = within_peak(self.captured.layer, ask, rest_bytes)
            if saved is None:
                break
            self.propose([saved])
            for name in list(self.proposed):
                self.read(name)
            found = next((v for v in self.variants.values() if v.saved.names == saved.names), None)
            if found is None:
                break  # its code cannot be read
            ask += limit - step_peak(found)
        return near()

    def keep_known(self, searched: str) -> None:
        """For later runs. ``searched``: for what all were found that a search proposes; "" if for nothing."""
        variants = {
            n: KnownVariant(v.saved, v.memory, v.step_ms, v.error, v.code_ms, v.refused)
            for n, v in self.variants.items()
        }
        self.known.keep(variants, searched)

    def running(self, layer: str) -> Variant:
        """The variant that ``layer`` runs: as planned, else the leanest."""
        wanted = self._session.variants.get(layer, "")
        # Code that is made anew has variants of the same names, which take other bytes.
        planned = self.variants.get(wanted) if self._session.shapes.get(layer) is self else None
        if planned is not None and _runs(planned):
            return planned
        if wanted and not self._session.not_as_planned:  # the first reason is the one that counts
            self._session.not_as_planned = f"{called(layer)} was compiled anew, so its part of the plan is gone"
        leanest = self._leanest()
        if self.whole and not self._is_lean_enough(leanest):
            self._session.compiled_now = True  # what is tried here is in no count of the step
            self.make_least()
            leanest = self._leanest()
        return leanest

    def _leanest(self) -> Variant:
        """Of those that can run."""
        names = dict.fromkeys([LEAST, AGAIN, *self.variants])  # of equals the first
        there = [self.variants[name] for name in names if name in self.variants]
        return min(filter(_runs, there), key=self._bytes_that_count)

    def _is_lean_enough(self, variant: Variant) -> bool:
        """For the first step of a model as one graph, until there is a plan."""
        limit = self._limit_bytes
        return self._session.watch is not None and (limit is None or self._step_bytes(variant) <= limit)

    def _bytes_that_count(self, variant: Variant) -> tuple[int, int]:
        memory = variant.memory
        return memory.peak_bytes if self.whole else memory.stored_bytes, memory.backward_peak_bytes

    def __call__(self, *inputs: Any) -> Any:
        variant = self.running(self._session.layer)
        self._session.ran = self, variant
        assert variant.run is not None
        return variant.run(*inputs)


def _runs(variant: Variant) -> bool:
    return variant.run is not None and not variant.refused


class ShapesOfGraph:
    """One kind of layer whose graph has symbols for sizes: a ``LayerShape`` for each set of sizes that is planned.

    A plan for larger sizes serves smaller ones. What it runs is proven once at each of them, since kernels treat what
    is left over of a row by other instructions than the rest.
    """

    def __init__(self, first: LayerShape, session: Session) -> None:
        self._session, self._first = session, first
        self._shapes = {first.captured.sizes.numbers: first}
        self._proven: dict[object, str] = {}

    def __call__(self, *inputs: Any) -> Any:
        session, numbers = self._session, self._first.captured.numbers_of(inputs)
        larger = session.shapes.get(session.layer)
        is_of_this = larger is not None and larger in self._shapes.values()
        if larger is not None and is_of_this and larger.captured.sizes.numbers != numbers:
            variant = larger.running(session.layer)
            reason = self._why_not(larger, variant, numbers, inputs)
            if not reason and variant.run is not None:
                session.ran = larger, variant
                return variant.run(*inputs)
            session.not_as_planned = (
                f"{called(session.layer)} does not serve these sizes by a plan for larger: {reason}"
            )
        if numbers not in self._shapes:
            captured = self._first.captured.at(inputs)
            self._shapes[numbers] = LayerShape(captured, session, whole=self._first.whole, other=self._first)
            session.compiled_now = True  # what was tried here is in no count of the step
        return self._shapes[numbers](*inputs)

    def _why_not(self, larger: LayerShape, variant: Variant, numbers: tuple[int, ...], inputs: Sequence[Any]) -> str:
        """Why a variant of ``larger`` does not run at these sizes; "" if it does."""
        plain = larger.variants[PLAIN]
        if variant is plain:
            return ""
        key = numbers, variant.saved.names, variant.runs_again  # by which its code is known
        if key not in self._proven:
            captured = larger.captured.at(inputs)
            if not all(map(captured.sizes.meet, variant.holds_for)):
                return "its code holds for other sizes"
            (self._proven[key],) = why_not_equal(captured, [variant], plain, at_most=_SAMPLES_AT_OTHER_SIZES)
        return self._proven[key]


class LayerKind:
    """Dynamo's backend for layers of one class; equal layers share what is compiled."""

    def __init__(
        self, session: Session, *, whole: bool = False, round_as_eager: bool = False, dynamic: bool = False
    ) -> None:
        self._session, self._whole, self._round_as_eager, self.dynamic = session, whole, round_as_eager, dynamic
        self.shapes: list[LayerShape] = []
        self._specs: dict[tuple, int] = {}

    def _uncompiled(self, graph: fx.GraphModule, why: str) -> Compiled:
        def run(*inputs: Any) -> Any:
            self._session.not_as_planned = f"{called(self._session.layer)} {why}"
            return graph(*inputs)

        return run

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Compiled:
        self._session.compiled_now = True
        captured = CapturedLayer(graph, inputs, round_as_eager=self._round_as_eager, dynamic=self.dynamic)
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in inputs if isinstance(t, torch.Tensor)):
            return captured.inference()
        specs = tuple(sorted(captured.input_specs.items()))
        self._specs.setdefault(specs, len(self._specs))  # layers that differ in a number share what they are given
        if self._specs[specs] >= _MOST_SHAPES:
            return self._uncompiled(
                graph,
                f"has more than {_MOST_SHAPES} sets of input shapes, the last of {_AS_IT_IS}. Pad the batches to a few "
                "lengths",
            )
        try:
            self.shapes.append(LayerShape(captured, self._session, whole=self._whole))
        except LowtideError as error:
            if not self._session.training:
                raise
            return self._uncompiled(graph, f"has a set of input shapes {_AS_IT_IS}. {str(error).rstrip('.')}")
        return ShapesOfGraph(self.shapes[-1], self._session) if captured.sizes.numbers else self.shapes[-1]


def _in_own_frame(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` of one of PyTorch's own modules, such as ``nn.Sequential``: what a frame of others calls, Dynamo takes
    in."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return run


class LayerCall:
    """Calls one compiled layer, and reports its start and end to the watch of the step.

    It takes the place of the module's call, hooks included, as ``module.compile()`` does. Of a module that FSDP2
    shards, before or after, it takes the place of ``forward`` alone: gathering and sharding are hooks, which are no
    part of a graph.

    Args:
        evaluate: For calls without gradients: calls its first argument with the others, compiled.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        backend: LayerKind | str,
        session: Session,
        evaluate: Callable[..., Any],
    ) -> None:
        self._name, self._module, self._session, self._evaluate = name, module, session, evaluate
        self._is_planned = isinstance(backend, LayerKind)  # PyTorch's own backend takes parts of a layer as well
        self._backend = backend
        self._is_dynamic = isinstance(backend, LayerKind) and backend.dynamic
        self._is_sharded = False
        module._compiled_call_impl = self
        self._take(module._call_impl)

    def _take(self, call: Callable[..., Any]) -> None:
        self._call_impl = call
        seen = _in_own_frame(call) if is_pytorchs_own(self._module) else call
        self._run = torch.compile(seen, backend=self._backend, fullgraph=self._is_planned, dynamic=self._is_dynamic)

    def _take_forward(self) -> None:
        self._is_sharded = True
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = None
        else:  # it is the model as one graph, which is called by way of the plan
            self._module._compiled_call_impl.before = None
        self._take(self._module.forward)
        self._module.__dict__["forward"] = self

    def remove(self) -> None:
        """Have the module as it was."""
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = None
        if self._module.__dict__.get("forward") is self:
            del self._module.__dict__["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_sharded and is_sharded(self._module):
            self._take_forward()
            return self._module._call_impl(*args, **kwargs)
        session, watch = self._session, self._session.watch
        if is_in_any_mode_without_ignore_compile_internals():
            # Dynamo leaves such a call alone, and in PyTorch 2.13 its code for good: no later step would be compiled.
            session.seen_by_a_mode |= torch.is_grad_enabled()
            return self._call_impl(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self._evaluate(self._call_impl, *args, **kwargs)
        session.enter(self._name)
        if watch is not None:
            watch.enter_forward(self._name, batch_tensors([*args, *kwargs.values()]))
        try:
            outputs = self._run(*args, **kwargs)
        except torch._dynamo.exc.BackendCompilerFailed as failed:
            inner: Exception = failed.inner_exception
            if session.training:
                outputs = self._as_it_is(f". It cannot be compiled: {str(inner).splitlines()[0]}", args, kwargs)
            elif isinstance(inner, LowtideError):
                raise type(inner)(f"{called(self._name)}: {inner}") from failed
            else:
                raise
        except torch._dynamo.exc.FailOnRecompileLimitHit:  # before anything ran
            outputs = self._as_it_is(". It was compiled anew too often", args, kwargs)
        except torch._dynamo.exc.Unsupported as broken:
            reason = (
                f"cannot be compiled as one graph: {str(broken).splitlines()[0]} Mend the break, which "
                "TORCH_LOGS=graph_breaks shows, or name other layers with layers="
            )
            if not session.training:
                raise UnsupportedModelError(f"{called(self._name)} {reason}.") from broken
            outputs = self._as_it_is(f". It {reason}", args, kwargs)
        finally:
            session.layer = ""
        if session.ran is None:
            return outputs
        made = batch_tensors(outputs)
        node = mark(made, session)
        if watch is not None:
            shape, variant = session.ran
            watch.leave_forward(self._name, shape, variant.memory, made, node, compiled_now=session.compiled_now)
        return outputs

    def _as_it_is(self, why: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._session.not_as_planned = f"{called(self._name)} is a layer {_AS_IT_IS}{why}"
        return self._call_impl(*args, **kwargs)
