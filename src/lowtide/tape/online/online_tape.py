"""The online tape: keeps a budget without a plan, while the user's own step runs for the first time.

Every op of the forward pass leaves a recipe that pins nothing. When live bytes would pass the budget, values are
proven and let go (``release.py``); autograd gets them made again when backward asks. In backward room is made as well:
by the mode, or, once it is known what that backward makes, where a tensor is unpacked (``learned_backward.py``). What
it does not understand it leaves alone: such tensors are saved, as without it.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._C import DispatchKey, _DisableTorchDispatch
from torch._C import _AutoDispatchBelowADInplaceOrView as below_autograd
from torch._C import _current_graph_task_id as graph_task
from torch._C import _dispatch_tls_is_dispatch_key_excluded as key_is_excluded
from torch._C import _dispatch_tls_set_dispatch_key_excluded as exclude_key
from torch._C import _storage_Use_Count as use_count
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.device.autocast import casting_inside, with_autocast
from lowtide.device.dispatch import NOTHING
from lowtide.device.generators import state_bytes
from lowtide.device.memory import allocated_bytes
from lowtide.device.names import is_accelerator
from lowtide.device.out_of_memory import is_out_of_memory, let_go_of_frames, tried_bytes
from lowtide.device.streams import current_stream
from lowtide.errors import LostMemoryError
from lowtide.recording.listener import StepListener, ToldSaved
from lowtide.simulation.caching_allocator import expandable_segments_here
from lowtide.step import module_calls
from lowtide.step.backward_entry import in_last_backward, observe
from lowtide.step.data_assignments import OTHER_MEMORY, DataAssignedError, DataAssignmentGuard
from lowtide.step.execution_state import ExecutionState, GeneratorState
from lowtide.step.function_calls import ObservedFunctionCall
from lowtide.step.operators import (
    UNINITIALISED,
    draws_random_numbers,
    is_opened_type,
    is_wrapper_type,
    may_draw_random_numbers,
    may_run_others,
    packet_name,
    storage_of,
    tensors_in,
    tensors_of,
)
from lowtide.step.seam import HookedMode, insert_mode, is_on, remove_mode, step_aside
from lowtide.step.sharding.observer import PauseDuringSharding, ShardingObserver
from lowtide.step.sharding.windows import NO_WINDOWS, OpenWindows
from lowtide.step.subclasses import PackedWrapper, bump_versions_of_parts, fake_mode_is_on, wrapped_parameters
from lowtide.tape import plain_derivatives
from lowtide.tape.online.foreign_ops import ForeignOp
from lowtide.tape.online.holdings import Holdings
from lowtide.tape.online.learned_backward import SeenBackward, UnseenBackward, has_room_unseen
from lowtide.tape.online.live_bytes import LiveBytes
from lowtide.tape.online.online_calls import KnownCalls, OnlineCall
from lowtide.tape.online.online_values import (
    MARK,
    Claim,
    Recipe,
    SavedHandle,
    StoredValue,
    UnreadableError,
    value_of_storage,
)
from lowtide.tape.online.open_calls import OpenCalls
from lowtide.tape.online.release import ATTEMPTS, Releaser
from lowtide.tape.online.replays import MOST_UNSPLIT_BYTES
from lowtide.tape.online.room import ExpectedBytes, Need
from lowtide.tape.online.running_op import RunningOp
from lowtide.tape.online.sharding import OnlineSharding
from lowtide.tape.online.writes import Writes
from lowtide.tape.values import Kept, detached, is_view_of_leaf, modified_in_place, sharing_version

_OUT_OF_MEMORY = object()
_OWN_REFERENCES = 2  # to a storage that one tensor has: the tensor's, and the storage's Python object
_NEARLY_FULL = 0.5  # of the budget lives
_OPS_BETWEEN_LOOKS = 4  # at what the device's allocator counts: 0.1 ms each
_OPS_BETWEEN_PROOFS = 16  # early ones, beside those at the end of each layer


class OnlineTape(HookedMode):
    """Watches one step of one model, and is thrown away with it.

    Attributes:
        live: What the step has made and still holds.
        releaser: Its ``budget_bytes`` is for what the step makes, resident bytes apart.
        expected: What ops of earlier steps allocated.
        problem: An error of the tape's own; from then on the step is saved as without it. "" as long as there is none.
        calls: Module calls that are open.
        crossing_bytes: Saved for autograd, and never let go: read outside a window that they were made in.
        writes: What they do to its values.
        known_calls: What calls of Functions have shown in earlier steps.
        running_call: The one that runs now, if its operators are of interest.
        listener: Whoever is told of the step, if anybody is.
        ran_opaque: Compiled code that ran, and whose inside nobody sees; "" if none did.
    """

    def __init__(
        self,
        model: nn.Module | None,
        budget_bytes: float,
        expected: ExpectedBytes | None = None,
        known_calls: KnownCalls | None = None,
        listener: StepListener | None = None,
    ) -> None:
        super().__init__()
        plain_derivatives.watch()
        self.listener = listener
        self._times = None if listener is None else listener.times
        self._model: Callable[[], nn.Module | None] = _no_model if model is None else weakref.ref(model)
        self._wrapped = model is not None and bool(wrapped_parameters(model))
        self.live = LiveBytes()
        self.gone_bytes: Callable[[], int] = int  # of what was there before the step, gone since the last look
        self._holdings = Holdings()
        self._expected = expected or ExpectedBytes()
        self.known_calls = known_calls or KnownCalls()
        self.releaser = Releaser(self._holdings, self.live, budget_bytes, self.known_calls.proofs)
        self.problem = ""
        self._peak_op = (0, 0, "")  # the highest peak that an op's workspace was in, the workspace, and whose it was
        self.running_call: OnlineCall | None = None
        self._last_sizes = (0, 0)  # bytes that the last op read, and made
        self._windows: OpenWindows | None = None  # of a sharded model
        self._run = ExecutionState(self._model, wrapped=self._wrapped)
        self.writes = Writes(self._run, self._holdings, self.live, self.releaser)
        self._number = 0
        self._bytes_before = 0  # allocated on the device before the step
        self._pauses = 0
        self._reserved_bytes = 0  # of the budget, for targets that only the loss will show
        self._inputs_bytes = 0  # of what was there before the step, and no call of the model was given
        self.calls = OpenCalls()
        self._assignments: DataAssignmentGuard[StoredValue] | None = None  # a listener looks
        if listener is None:
            self._assignments = DataAssignmentGuard(
                _keep_assigned, lambda value: value.num_reads > 0, lambda: "(a step without a plan)"
            )
        self._lock = threading.RLock()
        self._sequence = 0  # of the step's forward ops, as one number
        self._num_backwards = self._num_claimed = 0  # of the step
        self._seen_backward: SeenBackward | None = None  # the one that runs, if it is learned
        self._unseen_backward: UnseenBackward | None = None  # or if the mode is away
        self._forget_observer: Callable[[], None] = _no_model
        self.crossing_bytes = 0
        self.ran_opaque = ""
        self.op_s = 0.0  # what the host needed for the last op

    def begin_step(self, unseen_bytes: int = 0) -> None:
        """The step starts, or the rest of one that holds ``unseen_bytes`` already."""
        self.live.restart(unseen_bytes or self._expected.inputs_bytes or 0)
        model, run = self._model(), self._run
        first = next(model.parameters(), None) if model is not None else None
        if first is not None and is_accelerator(first.device):
            run.stream = current_stream(first.device)
            self.releaser.device = first.device
            run.most_unsplit_bytes = 0 if expandable_segments_here() else MOST_UNSPLIT_BYTES
            self._bytes_before = (allocated_bytes(first.device) or 0) - unseen_bytes
        if model is not None and (self._wrapped or run.gathered is not None):
            self._windows = run.windows = OpenWindows(model)
            if not unseen_bytes:  # else they are among them
                for tensor in self._windows.gathered_already():
                    self._count(tensor)
        self._forget_observer = observe(self, first=True)  # others end the step where a backward ends

    def reserve(self, size: int) -> None:
        """Leave so many bytes of the budget alone, and no more."""
        self.releaser.budget_bytes += self._reserved_bytes - size
        self._reserved_bytes = size

    def count_input(self, storage: torch.UntypedStorage, size: int) -> None:
        """``storage`` was there before the step, and no call of the model was given it: a target, mostly."""
        if storage in self.live:
            return
        self._inputs_bytes += size
        self.reserve(max(0, self._reserved_bytes - size))
        counted = self._expected.inputs_bytes or 0  # as live from the start
        if unexpected := max(0, min(size, self._inputs_bytes - counted)):
            self.live.add(storage, unexpected)

    def learn_inputs(self) -> None:
        """The step is over, and has shown all inputs that later ones will have."""
        self._expected.inputs_bytes = self._inputs_bytes

    @property
    def model(self) -> nn.Module | None:
        """None: there is none, or it is gone."""
        return self._model()

    @property
    def run_state(self) -> ExecutionState:
        """Of the present step."""
        return self._run

    @property
    def number(self) -> int:
        """Of the last op."""
        return self._number

    def next_number(self) -> int:
        """For an op that no dispatcher has shown."""
        self._number += 1
        return self._number

    def end_step(self) -> None:
        """Only what autograd may still ask for stays: somebody may keep the step's graph."""
        self.stop_observing()
        self._holdings.let_go_unclaimed()
        if not self.num_claims:
            for recipe in self.writes.outside:
                recipe.forget()
            self.writes.outside.clear()

    @property
    def num_claims(self) -> int:
        """Values that autograd still holds, in memory or released."""
        return sum(v.claim() is not None for v in self._holdings) + len(self._holdings.released)

    # -- backward -------------------------------------------------------------------------------------------

    def before_backward(self, roots: Iterable[Any], *, creates: bool) -> None:
        """What its ops make is learned; or was, and the mode is away until it ends."""
        if self.listener is not None and not (creates or self.problem or self._pauses):
            self.guarded(self.releaser.prove_rest)  # before gradients go: a plan has to drop for what forward held
        self.live.now -= self.gone_bytes()
        if self.listener is not None:
            self.listener.before_backward(creates=creates)
        self._num_backwards += 1
        self._seen_backward = self._unseen_backward = None
        if creates or self.problem or self._pauses or self._windows is not None or not is_on(self):
            return
        known, key = self._expected.backwards, self._key_of_backward
        try:
            if key not in known:
                self._seen_backward = SeenBackward(self.live, self.releaser)
                return
            learned = known.get(key) if self.listener is None else None
            if learned is not None and has_room_unseen(learned, self.releaser.device):
                self._unseen_backward = UnseenBackward(learned, self.live, self.releaser, self._unsplit_bytes)
                remove_mode(self)
        except Exception as error:  # nothing of ours may end the step
            self.give_up(error)

    def after_backward(
        self, roots: Iterable[Any], error: BaseException | None, *, retains: bool, creates: bool
    ) -> None:
        seen, self._seen_backward = self._seen_backward, None
        unseen, self._unseen_backward = self._unseen_backward, None
        if seen is not None and error is None and not self.problem:
            self._expected.backwards.learn(self._key_of_backward, seen.end())
        if unseen is not None:
            insert_mode(self)
            if not unseen.end() and error is None:
                self._expected.backwards.learn(self._key_of_backward, None)
        if self.listener is not None and error is None and (retains or creates):
            self.listener.end_retained_backward()

    def stop_observing(self) -> None:
        """Backwards are no concern of it any more, nor the one that runs: the mode, if it is away, stays so."""
        self._forget_observer()
        self._seen_backward = self._unseen_backward = None

    @property
    def _key_of_backward(self) -> tuple[int, ...]:
        return self._sequence, self.releaser.num_ops, self._num_backwards

    # -- module calls ---------------------------------------------------------------------------------------

    def enter(self, path: str) -> None:
        self.calls.enter(path)
        self.live.module = path
        if self._windows is not None:
            self._windows.enter(path, self.calls.count)
        if self.listener is not None:
            self.listener.enter(path)

    def leave(self) -> None:
        layer = self.calls.leave()
        self.live.module = self.calls.path
        if self._windows is not None:
            self._windows.leave()
        if layer and graph_task() == -1 and not self.problem:
            self.guarded(self.releaser.prove_layer, layer)
        if self.listener is not None:
            self.listener.leave()

    def go_on_inside(self, paths: Iterable[str]) -> None:
        """Calls of these modules are open: another observer saw their start, ``leave_outer`` gives their end."""
        for path in paths:
            self.calls.begin()
            if self._windows is not None:
                self._windows.enter(path, self.calls.count)

    def leave_outer(self) -> None:
        """See ``go_on_inside``."""
        if self._windows is not None:
            self._windows.leave()

    def opaque(self, path: str, module: nn.Module, run: Callable[[], Any], inputs: list[torch.Tensor]) -> Any:
        """A call of compiled code: what it makes is counted and never released."""
        if self.listener is not None:
            self.listener.note_compiled(path, module)
        self.ran_opaque = path or "the model"
        with _disable_current_modes():
            result = run()
        for tensor in tensors_in(result):
            self._count(tensor)
        return result

    def function(self, call: ObservedFunctionCall) -> Any:
        """A call of a custom autograd Function: one op where its operators do not say all that it does."""
        observed = self.observed_call(call)
        return observed.run() if self.listener is None else self.listener.function(observed)

    def observed_call(self, call: ObservedFunctionCall) -> ObservedFunctionCall:
        """``call`` as one that leaves a recipe, where it is part of the step."""
        if self._pauses or self.problem or self.releaser.busy or self.running_call is not None:
            return call
        wrapped = any(is_wrapper_type(type(t)) for t in tensors_in(call.args))
        return call if wrapped or fake_mode_is_on() else OnlineCall(self, call)

    def pause(self) -> None:
        self._pauses += 1

    def resume(self) -> None:
        self._pauses -= 1

    @property
    def sharding_observer(self) -> ShardingObserver:
        other = None if self.listener is None else self.listener.sharding
        return PauseDuringSharding(self, other) if self._windows is None else OnlineSharding(self, other, self._windows)

    def note_crossing(self, value: StoredValue) -> None:
        """``value`` is read here: it stays if that is outside a window that it was made in."""
        if not value.crosses and not value.windows <= self.windows_around:
            value.crosses = True
            self.crossing_bytes += value.bytes * (value.claim() is not None)

    @property
    def is_paused(self) -> bool:
        """What runs now is no part of the step."""
        return self._pauses > 0

    @property
    def windows_around(self) -> frozenset[int]:
        """Of a sharded model: those that are open."""
        return NO_WINDOWS if self._windows is None else self._windows.around

    @property
    def _layer(self) -> int:
        return self.calls.layer

    # -- operators ------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if types and not fake_mode_is_on() and any(map(is_opened_type, types)):
            bump_versions_of_parts(func, args, kwargs)
            return NotImplemented
        if may_run_others(func) and (casting := casting_inside()) is not None:
            with casting:
                return self.__torch_dispatch__(func, types, args, kwargs)
        if self.releaser.busy or self.problem or fake_mode_is_on() or func.namespace == "profiler":
            return func(*args, **kwargs)
        if self.listener is None:
            return self.run_op(func, args, kwargs)
        if self._reserved_bytes and graph_task() != -1 and not torch.is_grad_enabled():  # the loss is there
            self.reserve(0)
        return self.listener.run_op(self, func, args, kwargs)

    def run_op(self, func: Any, args: tuple, kwargs: dict, around: AbstractContextManager[Any] = NOTHING) -> Any:
        """Make room, run ``func`` with ``around`` open, leave a recipe. No error of the bookkeeping gets out."""
        if self.releaser.device is not None and self._number % _OPS_BETWEEN_LOOKS == 0 and self._is_nearly_full():
            self.releaser.aside_bytes = self._unsplit_bytes()
        need, inputs, in_backward = self._expected.needs[func], tensors_of(args), in_last_backward()
        if around is NOTHING and self.running_call is None:
            if not in_backward:
                if need.facts.is_view:
                    return self._run_view(need, inputs, func, args, kwargs)
            elif not need.asks:
                read_bytes = sum([t.numel() * t.itemsize for t in inputs])
                if self.releaser.has_room(need.at_most(read_bytes, inputs)):
                    return self._run_counted(need, inputs, read_bytes, func, args, kwargs)
        op = None
        try:
            op = self._begin(RunningOp(func, args, kwargs, need, inputs, in_backward=in_backward))
        except DataAssignedError:  # whatever came of it would be wrong
            raise
        except Exception as error:  # nothing of ours may end the step
            self.give_up(error)
        if op is not None and op.foreign is not None and op.foreign.is_watched:
            with around, self.writes.expected(op.inputs):
                result = self._run_with_room(func, args, kwargs, op)
        elif around is NOTHING:
            result = self._run_with_room(func, args, kwargs, op)
        else:
            with around:
                result = self._run_with_room(func, args, kwargs, op)
        if op is not None:
            try:
                self._finish(op, result, self.op_s)
                if self.running_call is not None:
                    self.running_call.note_op(args, result, op.written)
            except Exception as error:
                self.give_up(error)
        return result

    def _begin(self, op: RunningOp) -> RunningOp:
        """Before ``op`` runs: room is made for it, and what it reads is named, since it may write that."""
        self._number += 1
        op.number, op.layer = self._number, self._layer
        func, args, kwargs, facts = op.func, op.args, op.kwargs, op.need.facts
        self.make_room_for(op)
        if op.written:
            self.writes.keep_what_reads(op.written)
        if op.backward or self._pauses:
            return op
        self.releaser.num_ops = self._number
        if facts.random and draws_random_numbers(func, args, kwargs):
            created_on = torch.device(kwargs.get("device") or "cpu")
            device = next((t.device for t in op.inputs), created_on)
            self.releaser.make_room(op.room_bytes + state_bytes(device))
            op.rng = GeneratorState(device)
            if state_bytes(device):
                self.live.add(op.rng.storage)
        inputs = [*op.inputs, *tensors_in(kwargs)] if kwargs else op.inputs
        if facts.is_unknown and not op.written:
            op.foreign = ForeignOp(self.known_calls.operators, func, args, kwargs, inputs)
        read = self.note_reads_of_op(inputs, op.written)
        if not op.written:
            try:
                rng = with_autocast(op.rng) if may_run_others(func) else op.rng
                op.recipe = Recipe(func, args, kwargs, rng, self._run, read)
            except UnreadableError as error:
                op.unreadable = str(error)
        return op

    def _unsplit_bytes(self, held_bytes: int = 0) -> int:
        """To be left free: what the device's allocator counts and no storage of the step, nor ``held_bytes``, shows.

        That is of large blocks up to 1 MiB each that is not split off, and what others have made meanwhile.
        """
        device = self.releaser.device
        if device is None or not self._is_nearly_full(held_bytes):
            return 0
        counted = (allocated_bytes(device) or 0) - self._bytes_before
        return max(0, counted - self.live.now - held_bytes) + self._run.most_unsplit_bytes  # of the next block

    def _is_nearly_full(self, more_bytes: int = 0) -> bool:
        return self.live.now + more_bytes > _NEARLY_FULL * self.releaser.budget_bytes

    def _run_view(self, need: Need, inputs: list[torch.Tensor], func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an op of forward that makes nothing: who reads what it returns names memory, and how it lies there."""
        self._number += 1
        is_part = not self._pauses
        try:
            if is_part:
                self.releaser.num_ops = self._number
                self.note_reads_of_op(inputs)
        except DataAssignedError:  # whatever came of it would be wrong
            raise
        except Exception as error:
            self.give_up(error)
        result = self._run_timed(func, args, kwargs)
        self._last_sizes = 0, 0
        if not is_part or self.problem:
            return result
        try:
            if (assignments := self._assignments) is not None:
                for tensor in (result,) if type(result) is torch.Tensor else tensors_in(result):
                    if (value := value_of_storage(storage_of(tensor), self._run)) is not None:
                        assignments.add_view(tensor, value, written=False)
            self.calls.note_op()
            self._sequence = hash((self._sequence, id(need), 0))
        except Exception as error:
            self.give_up(error)
        return result

    def _run_counted(
        self, need: Need, inputs: list[torch.Tensor], read_bytes: int, func: Any, args: tuple, kwargs: dict
    ) -> Any:
        """Run an op of backward, for which there is room: what it makes is counted."""
        self._number += 1
        try:
            result = self._run_timed(func, args, kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            let_go_of_frames(error)
            result = _OUT_OF_MEMORY
        if result is _OUT_OF_MEMORY:
            op = self._begin(RunningOp(func, args, kwargs, need, inputs, in_backward=True))
            return self._run_with_room(func, args, kwargs, op)
        try:
            before = self.live.now
            for tensor in (result,) if type(result) is torch.Tensor else tensors_in(result):
                storage = storage_of(tensor)
                if storage is not None and storage not in self.live and not _is_given(tensor, storage, inputs):
                    self.new_value(storage, 0 if tensor.is_inference() else tensor._version, in_backward=True)
            self._last_sizes = read_bytes, self.live.now - before
            need.note(*self._last_sizes)
            if self._seen_backward is not None:
                self._seen_backward.note_op()
        except Exception as error:
            self.give_up(error)
        return result

    def _run_timed(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if (times := self._times) is not None:
            result = times.run(func, args, kwargs)
            self.op_s = times.last_s
            return result
        start = time.perf_counter()
        result = func(*args, **kwargs)
        self.op_s = time.perf_counter() - start
        return result

    def _run_with_room(self, func: Any, args: tuple, kwargs: dict, op: RunningOp | None) -> Any:
        """Run ``func``; where the device runs out of memory, let go of more and run it again.

        Not what writes: that may have begun. What drew random numbers draws the same ones again.
        """
        for attempt in range(ATTEMPTS):
            try:
                return self._run_timed(func, args, kwargs)
            except Exception as error:
                again = op is not None and not op.written and (op.rng or not may_draw_random_numbers(func))
                if attempt + 1 == ATTEMPTS or not again or self.problem or not is_out_of_memory(error):
                    raise
                failed = tried_bytes(error) << attempt
                let_go_of_frames(error)
            self.guarded(self.releaser.make_room_after_failure, failed, attempt)
            if op is not None and op.rng is not None:
                op.rng.put_back()
        raise AssertionError("the last attempt returns or raises")

    def make_room_for(self, op: RunningOp) -> None:
        """Make room for what ``op`` is about to allocate."""
        expected, releaser = self._expected, self.releaser
        op.read_bytes = sum([t.numel() * t.itemsize for t in op.inputs])
        if not op.need.facts.may_omit and releaser.has_room(op.need.at_most(op.read_bytes, op.inputs)):
            return
        op.key = key = expected.key(op.func, op.args)
        op.room_bytes = expected.of(key, op.func, op.args, op.kwargs)
        releaser.make_room(op.room_bytes)

    def make_room_for_call(self, size: int) -> None:
        """A call is about to run, of which operators do not show what it allocates, or again for a proof."""
        self.releaser.make_room(size)
        self.live.peak = max(self.live.peak, self.live.now + size)

    def learn_size(self, op: RunningOp, made_bytes: int) -> None:
        """``op`` has run. What its kernel takes besides counts in the peak, where it is known."""
        expected, self._last_sizes = self._expected, (op.read_bytes, made_bytes)
        if op.key is not None:
            expected.learn(op.key, made_bytes)
        op.need.note(op.read_bytes, max(op.room_bytes, made_bytes))
        if op.need.has_workspace:
            self.note_workspace(op.func, expected.known_workspace(op.key or expected.key(op.func, op.args)))

    def learn_workspace(self, func: Any, args: tuple, size: int) -> None:
        """``func``, which was the last op, has taken ``size`` beside what it made: its kernel was measured."""
        expected, (read_bytes, made_bytes) = self._expected, self._last_sizes
        key = expected.key(func, args)
        expected.learn(key, made_bytes)
        expected.learn_workspace(key, size)
        expected.needs[func].note(read_bytes, made_bytes + size)

    def note_workspace(self, func: Any, size: int) -> None:
        """``func`` has taken ``size`` beside all that lives now."""
        if self._seen_backward is not None and graph_task() != -1:
            self._seen_backward.note_op(size)
        if self.live.now + size > self.live.peak:
            self.live.peak = self.live.now + size
            where = "backward" if graph_task() != -1 else self.calls.path or "the model"
            self._peak_op = self.live.peak, size, f"{packet_name(func)} in {where}"

    @property
    def peak_workspace(self) -> tuple[int, str]:
        """The workspace in the step's peak, in bytes, and whose it was; 0 where what lived was more."""
        peak, size, op = self._peak_op
        return (size, op) if peak == self.live.peak else (0, "")

    def give_up(self, error: Exception) -> None:
        """Watch no more in this step; what was released is still made again.

        Raises:
            LostMemoryError: the error is that one, after which the step cannot go on.
        """
        if isinstance(error, LostMemoryError):
            raise error
        self.problem = self.problem or f"{type(error).__name__}: {error}".splitlines()[0]

    def guarded(self, call: Callable[..., Any], *args: Any) -> None:
        """Make a call of the tape's own, whose error ends no step; see ``give_up``."""
        try:
            call(*args)
        except Exception as error:
            self.give_up(error)

    def _finish(self, op: RunningOp, result: Any, seconds: float) -> None:
        live, in_forward = self.live, not (op.backward or self._pauses)
        assignments = self._assignments if in_forward else None
        made: list[tuple[int, StoredValue]] = []
        made_bytes = 0
        given = [*op.inputs, *op.written] if op.kwargs else op.inputs  # ``out=``: buckets of data parallelism
        for position, tensor in enumerate((result,) if type(result) is torch.Tensor else tensors_in(result)):
            storage = storage_of(tensor)
            if storage is None:
                continue
            if storage in live or _is_given(tensor, storage, given):
                value = value_of_storage(storage, self._run)
            elif tensor.is_inference():
                live.add(storage)
                continue
            else:
                value = self.new_value(storage, tensor._version, in_backward=op.backward)
                value.cost_s = seconds
                made_bytes += value.bytes
                made.append((position, value))
            if assignments is not None and value is not None:
                assignments.add_view(tensor, value, written=bool(op.written))
        self.learn_size(op, made_bytes)
        if self._seen_backward is not None:
            if not op.backward or any(map(self.writes.may_be_read, op.written)):
                self._seen_backward.keep_mode()
            self._seen_backward.note_op(max(0, op.room_bytes - made_bytes))
        if not in_forward:
            return
        self.calls.note_op()
        self._sequence = hash((self._sequence, id(op.need), made_bytes))
        if op.written:
            self.writes.note(op, seconds)
        elif made:
            self._leave_recipe(op, made)
            if self._number % _OPS_BETWEEN_PROOFS == 0:  # long layers, and what runs in none
                self.releaser.prove_layer(self._layer)
        elif op.foreign is not None:
            self._look_at_foreign(op.foreign)

    def new_value(self, storage: torch.UntypedStorage, version: int, *, in_backward: bool = False) -> StoredValue:
        """The present op has made ``storage``."""
        size = self.live.add(storage, in_backward=in_backward)
        value = StoredValue(storage, self._number, version, self._layer, self._run, size)
        storage.__dict__[MARK] = value
        return value

    def _leave_recipe(self, op: RunningOp, made: list[tuple[int, StoredValue]]) -> None:
        why = op.need.facts.why_not_replayed(op.args, op.kwargs)
        if op.foreign is not None:
            why = why or self._look_at_foreign(op.foreign)
        recipe = op.recipe
        if recipe is None or (why and why != UNINITIALISED):
            for _, value in made:
                value.why_kept = why or op.unreadable
            return
        if self._windows is None:
            recipe.place = self.calls.place
        recipe.take_outputs(made, expected=self._expected, key=op.key)
        for _, value in made:
            value.recipe, value.why_kept = recipe, why
        self.writes.outside.note(recipe)

    def note_written_unseen(self, tensor: torch.Tensor) -> None:
        """A kernel has written ``tensor``, which no version shows."""
        self.writes.end_value(tensor, tensor._version, self._number, self._layer)

    def _look_at_foreign(self, op: ForeignOp) -> str:
        """An operator of others has run. Returns why what it made is saved; "" if it need not be."""
        why, written = op.why_kept()
        for tensor in written:
            self.note_written_unseen(tensor)
        return why

    def note_reads_of_op(
        self, tensors: Iterable[torch.Tensor], written: Iterable[torch.Tensor] = ()
    ) -> dict[int, StoredValue | None]:
        """An op is about to read ``tensors``, of which it writes some. Returns by id of a tensor its value, if any."""
        own = {s._cdata for t in written if (s := storage_of(t)) is not None} if written else ()
        assignments, run, layer = self._assignments, self._run, self._layer
        found: dict[int, StoredValue | None] = {}
        for tensor in tensors:
            if assignments is not None:
                assignments.check(tensor)
            storage = storage_of(tensor)
            found[id(tensor)] = value = value_of_storage(storage, run)
            if value is not None and storage is not None and storage._cdata not in own:
                value.num_reads += 1
                value.last_use = self._number
                if value.layer != layer and value.layer:
                    value.leaves_layer = True
                if value.windows:
                    self.note_crossing(value)
        return found

    def _count(self, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        if storage is not None and storage not in self.live:
            self.live.add(storage)

    # -- autograd -------------------------------------------------------------------------------------------

    @module_calls.never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd holds for ``tensor``: a handle if an op under the tape made it, else itself."""
        kind = type(tensor)
        if kind is not torch.Tensor and is_wrapper_type(kind):
            return PackedWrapper(tensor, self.pack)
        if self._assignments is not None and not self.problem:
            self._assignments.check(tensor)
        value = value_of_storage(storage_of(tensor), self._run)
        if (
            kind is nn.Parameter
            or value is None
            or tensor.is_inference()
            or value.version != tensor._version
            or self.problem
        ):
            plain = kind is nn.Parameter or tensor.is_leaf or is_view_of_leaf(tensor)
            return self._told(tensor, Kept(tensor if plain else detached(tensor)), None)
        claim = value.claim()
        if claim is None:
            self._num_claimed += 1
            claim = Claim(value, self._holdings.end_claim, self._num_claimed)
            self._holdings.claim(value, claim, memory_of(tensor))
            self.note_claimed(value)
            self.crossing_bytes += value.bytes * value.crosses
        value.num_reads += 1
        value.last_use = self._number
        if value.windows:
            self.note_crossing(value)
        return self._told(tensor, SavedHandle(claim, tensor), value)

    def _told(self, tensor: torch.Tensor, packed: Kept | SavedHandle, value: StoredValue | None) -> Any:
        """What autograd holds for ``tensor``, once whoever listens has been told."""
        return packed if self.listener is None or self._pauses else self.listener.stored(tensor, packed, value)

    @module_calls.never_compiled
    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor that ``pack`` was given. Called by autograd inside backward.

        Raises:
            RuntimeError: it was changed in place, as plain autograd does.
            ReplayError: it was released and cannot be made again exactly.
        """
        if type(packed) is PackedWrapper:
            return packed.unpack(self.unpack)
        if type(packed) is ToldSaved:
            tensor = self.unpack(packed.packed)
            packed.listener.given(packed, tensor)
            return tensor
        if step_aside() and self.listener is not None:
            self.listener.note_unseen_node()
        backward = self._seen_backward or self._unseen_backward
        if backward is not None:
            backward.note_unpacking(0 if type(packed) is Kept else packed.claim.number)
        if type(packed) is Kept:
            if packed.changed():
                raise modified_in_place(packed.tensor, packed.tensor.shape, packed.version)
            self._end_of_unpacking(backward)
            return packed.tensor
        value = packed.claim.value
        with self._lock:
            if value.tensor is None:
                self.releaser.remake(value)
            value.last_use = self._number
            memory = value.tensor
            assert memory is not None
            if memory._version != value.version or not (value.remade or packed.version == value.version):
                raise modified_in_place(memory, packed.size, packed.version)
            with _DisableTorchDispatch(), below_autograd():
                tensor = packed.view_of(memory)
            self._end_of_unpacking(backward)
            return tensor

    def _end_of_unpacking(self, backward: SeenBackward | UnseenBackward | None) -> None:
        if backward is not None and not self.problem:
            self.guarded(backward.note_unpacked)

    def note_claimed(self, value: StoredValue) -> None:
        """Autograd wants ``value`` from now on; its memory is held."""
        self.releaser.reserve_for(value)


def _is_given(tensor: torch.Tensor, storage: torch.UntypedStorage, inputs: list[torch.Tensor]) -> bool:
    """Whether an op has returned memory that it was given: ``_unsafe_view`` does, whose schema says otherwise."""
    if use_count(storage._cdata) > _OWN_REFERENCES or any(t is tensor for t in inputs):
        return any(storage_of(t) is storage for t in inputs)
    return False


def _no_model() -> None:
    return None


def _keep_assigned(value: StoredValue) -> None:
    value.why_kept = value.why_kept or OTHER_MEMORY


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that counts versions with it, and reads the memory as it is."""
    before = key_is_excluded(DispatchKey.Python)
    exclude_key(DispatchKey.Python, True)
    try:
        tensor = sharing_version(tensor)
        if tensor.is_conj():
            tensor = tensor.conj()
        return torch._neg_view(tensor) if tensor.is_neg() else tensor
    finally:
        exclude_key(DispatchKey.Python, before)
