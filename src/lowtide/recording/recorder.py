"""Records one step below autograd: a dispatch mode that puts every operator into a ``GraphBuilder``.

In a rehearsal, nothing that autograd stores is held while the step is recorded: the pack hook keeps a tensor's
description, and backward gets a blank one of the same shape. So memory stays far below the plain step's, a storage's
death shows its pure Python lifetime, and the gradients, which nothing uses, are wrong. Integer and boolean tensors are
held as copies: backward uses them as indices.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from lowtide.device.autocast import casting_inside
from lowtide.device.dispatch import NOTHING, UncompiledMode, bytes_of
from lowtide.device.generators import state_bytes
from lowtide.device.memory import give_back_peak
from lowtide.errors import UnsupportedModelError
from lowtide.gc_control import gc_disabled
from lowtide.graph.step_graph import Op
from lowtide.measurement.allocator import measuring
from lowtide.measurement.op_inputs import describe
from lowtide.recording.compiled_regions import CompiledRegions
from lowtide.recording.gradient_sums import GradientSums
from lowtide.recording.graph_builder import GraphBuilder, Mark
from lowtide.recording.live_storages import LiveStorages
from lowtide.recording.opaque_calls import CallsAsOne
from lowtide.recording.saved_tensor_hooks import SavedTensorHooks
from lowtide.recording.sharding import ShardingRecording
from lowtide.step import optimizer_steps, subclasses
from lowtide.step.backward_entry import in_last_backward, is_autograds_own
from lowtide.step.data_assignments import OTHER_MEMORY, DataAssignmentGuard
from lowtide.step.function_calls import ObservedFunctionCall
from lowtide.step.operators import (
    COMMUNICATES,
    OPERATORS,
    OVERWRITERS,
    PLAIN_TYPES,
    UNINITIALISED,
    WRITES,
    draws_random_numbers,
    fills_its_storage,
    fingerprint,
    gradient_of,
    is_opened_type,
    may_run_others,
    may_write_undeclared,
    omitted_in_replay,
    packet_name,
    shape_depends_on_values,
    tensors_in,
    tensors_of,
    written_tensors,
)
from lowtide.step.sharding.units import units_of
from lowtide.step.sharding.zero3 import gathered_parameters_of
from lowtide.step.subclasses import plain_tensors

# Of an op's signature, operator and arguments, its workspace bytes, and positions of tensors that it writes undeclared.
KernelFacts = Callable[[dict[str, Any], Any, tuple, dict], tuple[int, list[int]]]
# Runs an op with the given context open around its kernel alone: whoever runs it may have work of its own besides.
RunOp = Callable[[AbstractContextManager[Any]], Any]
# What PyTorch's own kernels write undeclared, by ``_kernel``: shapes have no say, so one look at each is enough.
_undeclared_writes: dict[tuple, list[int]] = {}


class Recorder(UncompiledMode):
    """Records one step in ``builder``; the observer of its module calls. ``stop`` ends it."""

    def __init__(
        self,
        device: torch.device,
        *,
        region: str,
        restores_parameters: bool = True,
        kernel_facts: KernelFacts | None = None,
        proves_calls: bool = True,
    ) -> None:
        """Record what runs under the mode, or is given to ``record``.

        Args:
            kernel_facts: Where there is no memory to look at; else each signature's first run is watched.
            proves_calls: A call of a Function that is one op runs again at once; its backward is one op, too.
        """
        super().__init__()
        self.device = device
        self._kernel_facts = kernel_facts
        self._restores_parameters = restores_parameters
        self.builder = GraphBuilder(region=region)
        self.live = LiveStorages(self.builder, device)
        self.sums = GradientSums(self.live)
        self.new_gradients: dict[str, set[int]] = {}  # by parameter: storages that the step's backward made
        self.written_parameters: dict[
            int, None
        ] = {}  # storages, in order, that the step writes (``p.data.mul_(...)``, mostly)
        self.parameters: dict[int, torch.Tensor] = {}  # by storage
        optimizer_steps.watch()
        self._steps_before = optimizer_steps.count
        self.made_state_bytes = 0  # of an optimizer's state
        self._end: tuple[Mark, int] | None = None  # of the last backward: what there was then, and parameters written
        self._steps_in_backward: dict[int, tuple[int, int]] = {}  # by storage: the version before, and writes since
        self._before_writes: list[tuple[torch.Tensor, torch.Tensor]] = []  # their memory, and a copy of it before
        builder = self.builder  # autograd holds the guard, which must not lead to us and from us to its nodes
        self.assignments = DataAssignmentGuard[int](
            lambda storage: builder.fix(storage, OTHER_MEMORY), builder.was_read, lambda: builder.path
        )
        self._compiled = CompiledRegions(self.builder, self.live, device)
        self.enter, self.leave, self.opaque = self.builder.enter, self.builder.leave, self._compiled.record
        self.functions = CallsAsOne(
            self.builder,
            self.live,
            device,
            proves=proves_calls,
            open_in_backward=self._compiled.open_in_backward,
            why_fixed=self._why_fixed,
            note_made=self.sums.add_made,
        )
        self.hooks = SavedTensorHooks(self.builder, self.live, self._compiled, self.assignments, self.functions.stored)
        self._signatures: dict[str, int] = {}  # same operator on tensors of the same shapes and types
        self._signature_by_key: dict[tuple, int] = {}  # the same, without writing it out
        self._workspace_bytes: dict[int, int] = {}  # what a kernel allocates beside its outputs, by signature
        self.profiled = False  # a profiler was active: what kernels take beside what they make is not known
        self._undeclared_writes: dict[int, list[int]] = {}  # by signature, positions of inputs
        self.sharding_observer: ShardingRecording | None = None
        self._value_shaped: set[int] = set()  # storages whose shape depends on values
        self._backward = False

    def observe_sharding(self, model: nn.Module) -> None:
        """FSDP or ZeRO-3 gathers parameters of ``model``, if any."""
        if not units_of(model) and gathered_parameters_of(model) is None:
            return
        self.sharding_observer = self.hooks.sharding = ShardingRecording(self.builder, self.live, model)

    def function(self, call: ObservedFunctionCall) -> Any:
        """A call of a custom autograd Function."""
        return call.run() if self._kernel_facts is not None else self.functions.record(call)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if may_run_others(func) and (casting := casting_inside()) is not None:
            with casting:
                return self.__torch_dispatch__(func, types, args, kwargs)
        builder = self.builder
        if builder.ops_ignored or not builder.recording or func.namespace == "profiler" or subclasses.fake_mode_is_on():
            return func(*args, **kwargs)
        if types and any(map(is_opened_type, types)):
            for part in subclasses.bump_versions_of_parts(func, args, kwargs):
                if (number := self.live.id_of(part)) is not None:
                    builder.end_completion(number)
            return NotImplemented

        adds_gradient = func is torch.ops.aten.add_.Tensor and self._is_gradient(args[0])

        def run(around: AbstractContextManager[Any]) -> Any:
            if adds_gradient:  # nobody needs the sum, and it may be the user's gradient
                return args[0]
            with around:
                return func(*args, **kwargs)

        return self.record(func, args, kwargs, run)

    def record(self, func: Any, args: tuple, kwargs: dict, run: RunOp) -> Any:
        """What ``run`` returns, which runs ``func`` on plain tensors, recorded as an op of the step."""
        if is_autograds_own(func):
            return run(NOTHING)
        builder, number_of, facts = self.builder, self.number_of, OPERATORS[func]
        backward = self._backward or in_last_backward()
        inputs = tensors_of(args)
        if kwargs:
            inputs += tensors_in(kwargs)
        found: dict[Any, None] = {}
        for tensor in inputs:
            if type(tensor) not in PLAIN_TYPES and not _is_plain_parameter(tensor):
                raise UnsupportedModelError(
                    f"{func} got a {type(tensor).__module__}.{type(tensor).__qualname__} in module {builder.path}.\n"
                    "  Tensor subclasses that do not say what they wrap (__tensor_flatten__) are not taped.\n"
                    "Train this model without lowtide, or unwrap the tensor before the step."
                )
            found[number_of(tensor)] = None
        lacks_storage = None in found
        found.pop(None, None)
        reads = tuple(found)
        not_replayed: list[int | None] = []
        if facts.may_omit:
            omitted = omitted_in_replay(func, args)
            not_replayed = [number_of(args[i]) for i in omitted if isinstance(args[i], torch.Tensor)]
            reads = tuple(n for n in reads if n not in not_replayed)
        to_write: list[torch.Tensor] = []
        writes: tuple[int, ...] = ()
        if facts.writes:
            to_write = written_tensors(func, args, kwargs)
            writes = tuple(dict.fromkeys(n for n in map(number_of, to_write) if n is not None))
        for tensor in inputs:
            self.assignments.check(tensor)
        for tensor in to_write:
            if func is not torch.ops.aten.add_.Tensor or not self._is_gradient(tensor):
                self._copy_before_write(tensor)
        signature = self._signature_of(func, args, kwargs)
        reason = facts.why_not_replayed(args, kwargs)
        if signature in self._workspace_bytes:
            result = run(NOTHING)
        else:
            result = self._run_first(signature, func, (args, kwargs), inputs, run)
        rng_bytes = 0
        if facts.random and draws_random_numbers(func, args, kwargs):
            rng_bytes = state_bytes(self.device)
        if undeclared := self._undeclared_writes[signature]:
            changed = {n for i in undeclared if (n := number_of(inputs[i])) is not None} - set(writes)
            if changed.difference(not_replayed):
                reason = reason or "changes an input that its schema says it only reads"
            writes += tuple(sorted(changed))
        if not reason and lacks_storage:
            reason = "reads a tensor without one plain storage"
        if backward:
            self.sums.add_op(len(builder.ops), func, args, inputs)
        self._add_op(func, args, result, reads, writes, reason, signature, rng_bytes, backward=backward)
        self.functions.note_op(result, to_write)
        return result

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The storage that ops read which read ``tensor``. A storage never seen before is added."""
        if self.sharding_observer is not None:
            stands_for = self.sharding_observer.number_of(tensor)
            if stands_for is not None:
                return stands_for
        return self.live.id_of(tensor)

    def _signature_of(self, func: Any, args: tuple, kwargs: dict) -> int:
        try:
            key = (func, *map(_key_of, args), *((name, _key_of(a)) for name, a in kwargs.items()))
            return self._signature_by_key[key]
        except (TypeError, RuntimeError):  # an argument that no key stands for; a tensor without strides
            key = None
        except KeyError:
            pass
        signature = describe(func, args, kwargs)
        text = json.dumps(signature, sort_keys=True)
        if text not in self._signatures:
            self._signatures[text] = self.builder.add_signature(signature)
        if key is not None:
            self._signature_by_key[key] = self._signatures[text]
        return self._signatures[text]

    def _run_first(self, signature: int, func: Any, given: tuple, inputs: list[torch.Tensor], run: RunOp) -> Any:
        """What ``run`` returns, which runs ``func``, of a signature that is new: it is watched.

        What counts is what the kernel allocates, and which inputs it changes though its schema says that it only reads
        them.
        """
        if self._kernel_facts is not None:
            facts = self._kernel_facts(self.builder.signatures[signature], func, *given)
            self._workspace_bytes[signature], self._undeclared_writes[signature] = facts
            return run(NOTHING)
        with self.builder.ignoring_ops():
            if func.namespace in COMMUNICATES:  # what they write may come after the call has returned: no use looking
                self._undeclared_writes[signature] = list(range(len(inputs))) if may_write_undeclared(func) else []
                self._workspace_bytes[signature] = 0
                return run(NOTHING)
            kernel = _kernel(func, given, inputs)
            known = _undeclared_writes.get(kernel)
            before = [fingerprint(t) for t in inputs] if known is None else []
            counter = None

            @contextmanager
            def measured() -> Iterator[None]:
                nonlocal counter
                # What garbage allocates when it goes, or frees, is no part of the kernel.
                with gc_disabled(), measuring(self.device) as counter:
                    self.profiled |= counter is None and self.device.type == "cpu"
                    yield

            result = run(measured())
            if known is None:
                known = [i for i, t in enumerate(inputs) if fingerprint(t) != before[i]]
                if func.namespace == "aten":
                    _undeclared_writes[kernel] = known
            self._undeclared_writes[signature] = known
            self._workspace_bytes[signature] = 0 if counter is None else counter.workspace
            return result

    def _copy_before_write(self, tensor: torch.Tensor) -> None:
        number = self.number_of(tensor)
        if number is None or number in self.written_parameters or self._is_gathering(number):
            return
        if self.builder.storages[number].kind in ("parameter", "gradient"):
            self.written_parameters[number] = None
            if not self._restores_parameters:
                return
            with self.builder.ignoring_ops():
                now = bytes_of(tensor.untyped_storage())
                self._before_writes.append((now, now.clone()))

    def _is_gradient(self, tensor: torch.Tensor) -> bool:
        number = self.live.id_of(tensor)
        return number is not None and self.builder.storages[number].kind == "gradient"

    def _is_gathering(self, storage: int) -> bool:
        return self.sharding_observer is not None and self.sharding_observer.is_gathering(storage)

    def _moves(self, storage: int) -> bool:
        """``storage`` is of a parameter that is gathered, each time into other memory."""
        return self.sharding_observer is not None and storage in self.sharding_observer.gathered

    def _add_op(
        self, func: Any, args: tuple, result: Any, reads: tuple[int, ...], writes: tuple[int, ...], reason: str,
        signature: int, rng_bytes: int, *, backward: bool,
    ) -> None:  # fmt: skip
        builder = self.builder
        number = builder.begin_op()
        fixed = ""
        if not backward:
            builder.add_reads(number, reads, writes)
            fixed = self._why_fixed(reads, reason)
        makes = self._add_outputs(number, result, fixed, backward=backward, writes=bool(writes))
        if backward:
            self.sums.add_made(makes)
        elif makes and all([builder.storages[s].fixed in ("", UNINITIALISED) for s in makes]):
            builder.allow_completion(makes)
        if makes and (shape_depends_on_values(func, args) or not self._value_shaped.isdisjoint(reads)):
            self._value_shaped.update(makes)
        completes = None
        if not backward and reason == WRITES and len(writes) == 1:
            completes = self._complete_inplace(func, result, writes[0], reads, rng_bytes)
        if completes is not None:
            rng_bytes = 0
        else:
            # What gathers a parameter gives it the values that it had.
            writes = tuple([s for s in writes if not self._is_gathering(s)]) if writes else ()
            for s in writes:
                if not (backward and self._note_step_in_backward(s)):
                    builder.mark_written(s)
        builder.ops.append(
            Op(
                number,
                _name_of(func),
                builder.frame,
                backward,
                reads,
                tuple(makes),
                writes,
                workspace_bytes=self._workspace_bytes[signature],
                rng_bytes=rng_bytes,
                signature=signature,
                dynamic=bool(makes) and makes[0] in self._value_shaped,
                completes_inplace=completes,
            )
        )

    def _why_fixed(self, reads: tuple[int, ...], reason: str) -> str:
        """Why what a forward op makes must be saved; "" if it may be recomputed."""
        builder = self.builder
        if self.sharding_observer is not None:
            reason = self.sharding_observer.why_fixed(reads) or reason
        if reason:
            return reason
        storages = builder.storages
        if any([storages[s].op is None and storages[s].fixed for s in reads]):  # that changes during the step
            return "reads memory that is written during the step"
        if builder.region == "model" and builder.frame == 0:
            return "runs outside the model"
        return ""

    def _add_outputs(self, op: int, result: Any, fixed: str, *, backward: bool, writes: bool) -> list[int]:
        """The storages that ``op`` has made; views of known ones, and outputs that it was given, are none."""
        makes: list[int] = []
        kind = "backward" if backward else "activation"
        for output, tensor in enumerate((result,) if type(result) is torch.Tensor else tensors_in(result)):
            if tensor.is_inference():
                fixed = fixed or "made in inference mode"
            known = len(self.builder.storages)
            number = self.live.id_of(tensor, kind, op=op, output=output, fixed=fixed)
            if number == known:
                makes.append(number)
                if not backward:
                    self.assignments.add(tensor, number)
            elif number is not None and not backward and not self._moves(number):
                self.assignments.add_view(tensor, number, written=writes)
        return makes

    def _complete_inplace(
        self, func: Any, result: Any, written: int, reads: tuple[int, ...], rng_bytes: int
    ) -> int | None:
        """The op whose output this in-place op completes: both are replayed as one, and the output may be dropped."""
        builder = self.builder
        others = tuple(s for s in reads if s != written)
        maker = builder.maker_to_complete(written, others)
        if maker is None:
            return None
        if builder.storages[written].fixed == UNINITIALISED:
            if packet_name(func) not in OVERWRITERS or not fills_its_storage(next(tensors_in(result))):
                return None
            builder.unfix(written)
        builder.complete_inplace(maker, others, rng_bytes)
        return maker

    def _note_step_in_backward(self, storage: int) -> bool:
        """Whether ``storage`` is a parameter, which an optimizer that steps in backward writes, mostly."""
        parameter = self.parameters.get(storage)
        if parameter is None:
            return False
        version, writes = self._steps_in_backward.get(storage, (parameter._version, 0))
        self._steps_in_backward[storage] = version, writes + 1
        return True

    def settle_writes(self) -> None:
        """A backward is over: what it has written unseen (``p.data``) no replay may read, not even before that.

        A write that counts a version is found by a replay that comes too late, and so is an optimizer's step. A step
        of which no operator shows (a library's own kernels) has no place in the record: what it wrote stays fixed.
        """
        for storage, parameter in self.parameters.items():
            version, writes = self._steps_in_backward.get(storage, (0, 0))
            stepped = optimizer_steps.written_since(self._steps_before, parameter, in_backward=True)
            if stepped != bool(writes) and (stepped or parameter._version - version < writes):
                self.builder.mark_written(storage)
        self._steps_in_backward.clear()
        self._steps_before = optimizer_steps.count

    def before_backward(self, roots: Iterable[Any], *, creates: bool) -> None:
        self.builder.begin_backward()

    def after_backward(
        self, roots: Iterable[Any], error: BaseException | None, *, retains: bool, creates: bool
    ) -> None:
        if error is None and (retains or creates):
            self.builder.end_retained_backward()

    def note_end(self) -> None:
        """A backward is over. If it was the last one, the step ends here, and ``cut`` takes out what came later.

        Nothing of its graph is held any more, which may have been retained for another.
        """
        self.sums.forget_nodes()
        self.settle_writes()
        self._end = self.builder.mark(), len(self.written_parameters)

    def cut(self) -> None:
        """Until the last backward that was over, if there was one."""
        if self._end is not None:
            mark, written = self._end
            self.builder.cut(mark)
            self.written_parameters = dict.fromkeys(list(self.written_parameters)[:written])

    def note_state(self, tensors: Iterable[torch.Tensor]) -> None:
        """What an optimizer keeps: what the step itself has made of it, while backward ran, later steps find there."""
        found = {n for t in tensors if (n := self.live.find(t)) is not None and n < len(self.builder.storages)}
        self.made_state_bytes = sum(map(self.builder.count_elsewhere, found))

    def start_backward(self) -> None:
        self._backward = True

    def note_gradients(self, model: nn.Module) -> set[str]:
        """A backward has ended: names of the parameters that have a gradient; which of these it made is noted."""
        found = set()
        for name, p in model.named_parameters():
            if (grad := gradient_of(p)) is None:
                continue
            found.add(name)
            numbers = {n for t in plain_tensors(grad) if (n := self.live.find(t)) is not None}
            if new := {n for n in numbers if self.builder.note_gradient(n)}:
                self.new_gradients[name] = new
        return found

    def stop(self) -> None:
        """Record no more, restore the parameters that the step wrote, and hold nothing of the step's graph."""
        self.builder.recording = False
        self._compiled.open_in_backward.close()
        self.live.stop()
        give_back_peak(self.device)
        for now, before in self._before_writes:
            now.copy_(before)
        self._before_writes.clear()
        self.sums.forget_nodes()


def _key_of(argument: Any) -> Any:
    """Equal keys have equal descriptions. Raises: TypeError: nothing stands for it."""
    kind = type(argument)
    if kind is torch.Tensor or kind is nn.Parameter:
        return argument.shape, argument.stride(), argument.dtype, argument.device
    if kind is list or kind is tuple:
        return tuple(map(_key_of, argument))
    if kind is float:
        return kind, argument or repr(argument)  # 0.0 is described otherwise than -0.0
    if kind in _KEYS:
        return kind, argument
    raise TypeError(kind)


_KEYS = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


def _kernel(func: Any, given: tuple[tuple, dict], inputs: list[torch.Tensor]) -> tuple:
    """What decides which inputs an operator writes: which tensors there are, their types, and flags."""
    args, kwargs = given
    flags = [a if isinstance(a, bool) or a is None else type(a) for a in (*args, *kwargs.values())]
    return func, *flags, *kwargs, *(t.dtype for t in inputs), *(t.device.type for t in inputs[:1])


@cache
def _name_of(func: Any) -> str:
    return str(func)


def _is_plain_parameter(tensor: torch.Tensor) -> bool:
    """A Parameter subclass that only carries attributes dispatches like a Parameter."""
    dispatch = type(tensor).__torch_dispatch__
    return isinstance(tensor, nn.Parameter) and dispatch is torch._C._disabled_torch_dispatch_impl
