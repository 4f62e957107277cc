"""A tape around one call that drops at once all that can be made again: what checkpointing keeps, and no more.

Nothing waits for memory to run short here. When autograd wants a value, its memory is not held for that; what the
call was given is held in its place, and backward makes the value again. Proof at birth: the first op of its kind runs
twice, and is dropped only if both runs give the same bits. The process remembers which kinds gave them, so later steps
pay for no proof.

An inner call leaves a *scope*. Backward in one scope makes what the scopes around it need and holds that, not what
other inner scopes need, which is made when backward comes to them: recursive checkpointing.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import _AutoDispatchBelowADInplaceOrView as below_autograd
from torch._C import _current_graph_task_id as graph_task
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.step import function_calls, module_calls
from lowtide.step.execution_state import no_autocast
from lowtide.step.function_calls import ObservedFunctionCall
from lowtide.step.operators import UNINITIALISED, storage_of
from lowtide.step.storage_bits import same_storage_bits, sum_of_words
from lowtide.tape.online.holdings import Holdings
from lowtide.tape.online.live_bytes import LiveBytes
from lowtide.tape.online.online_calls import KnownCalls
from lowtide.tape.online.online_tape import OnlineTape, memory_of
from lowtide.tape.online.online_values import MARK, Recipe, StoredValue, value_of_storage
from lowtide.tape.online.release import Releaser
from lowtide.tape.online.replays import chain_of, pinned_bytes
from lowtide.tape.online.room import ExpectedBytes, Key
from lowtide.tape.online.running_op import RunningOp
from lowtide.tape.online.writes import Writes
from lowtide.tape.recipes import keeps_graph

_SEAL_EVERY = 17  # values; a prime, so that a step of any length seals other values each time
_MOST_PROVEN = 20_000  # kinds that are remembered
_claims = itertools.count()
_gives_same_bits: dict[tuple, bool] = {}  # by kind of op
_known_calls = KnownCalls()


class DroppingTape(OnlineTape):
    """Open ``around`` the call; what autograd stored in it refers to the tape from then on."""

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__(model, math.inf, _AnyRoom(), _known_calls)
        self._outer: list[frozenset[int]] = [frozenset({0})]  # by scope: it and those around it
        self._scopes = [0]  # that are open
        self.releaser = _Remaker(self._holdings, self.live, self._outer)
        self.writes = _CountedWrites(self, self._run, self._holdings, self.live, self.releaser)
        self._flags = self._run.flags
        # While there are none, all that a value is made from can be made again.
        self.num_fixed = 0
        self._backward = -1  # over a retained graph: the last one

    @contextmanager
    def around(self) -> Iterator[None]:
        """Inside, ops are seen and what autograd stores is dropped."""
        state = module_calls.thread_state
        stop_seeing_functions = function_calls.install(state)
        try:
            with state.observed_by(self), torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack), self:
                yield
        finally:
            stop_seeing_functions()
            self._forget_living()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """An inner call."""
        number = len(self._outer)
        self._outer.append(self._outer[self._scopes[-1]] | {number})
        self._scopes.append(number)
        try:
            yield
        finally:
            self._scopes.pop()

    def _forget_living(self) -> None:
        """The call is over: an output that the caller holds pins nothing of it."""
        for storage in self.live.storages():
            if value_of_storage(storage, self._run) is not None:
                del storage.__dict__[MARK]
        self.live.restart()

    # -- the base's decisions ---------------------------------------------------------------------------------

    def enter(self, path: str) -> None:
        """A module call: of no interest here."""

    def leave(self) -> None:
        """See ``enter``."""

    @property
    def _layer(self) -> int:
        return self._scopes[-1]

    def function(self, call: ObservedFunctionCall) -> Any:
        self.num_fixed += 1  # what it makes may have to stay
        return super().function(call)

    def make_room_for(self, op: RunningOp) -> None:
        op.key = ()  # and no room: shapes are of no interest

    def learn_size(self, op: RunningOp, made_bytes: int) -> None:
        pass

    def note_claimed(self, value: StoredValue) -> None:
        try:
            if not self._may_be_dropped(value):
                return
            if next(_claims) % _SEAL_EVERY == 0:
                assert value.tensor is not None
                with _disable_current_modes(), below_autograd():
                    value.seal = sum_of_words(value.tensor)
            self._holdings.release(value)
        except Exception as error:  # it stays
            self.give_up(error)

    def _may_be_dropped(self, value: StoredValue) -> bool:
        if value.recipe is None or value.why_kept:
            return False
        if not self.num_fixed:
            return True
        chain = chain_of([value])
        return chain is not None and pinned_bytes(chain) < value.bytes

    # -- proof ------------------------------------------------------------------------------------------------

    def _leave_recipe(self, op: RunningOp, made: list[tuple[int, StoredValue]]) -> None:
        super()._leave_recipe(op, made)
        recipe = made[0][1].recipe
        if recipe is not None and not made[0][1].why_kept and not self.is_proven(op, recipe):
            for _, value in made:
                value.recipe, value.why_kept = None, "another run gives other bits"
        self.num_fixed += any(value.recipe is None or value.why_kept for _, value in made)

    def is_proven(self, op: RunningOp, recipe: Recipe) -> bool:
        """Whether ops of this kind give the same bits again; at first sight this one runs again."""
        kind = (self._flags, op.func, _kind_of(op.args), _kind_of(tuple(op.kwargs.items())))
        try:
            found = _gives_same_bits.get(kind)
        except TypeError:  # an argument of a type that nobody knows
            return False
        if found is None:
            found = self._gives_same_bits_again(recipe)
            if len(_gives_same_bits) >= _MOST_PROVEN:
                _gives_same_bits.clear()
            _gives_same_bits[kind] = found
        return found

    def _gives_same_bits_again(self, recipe: Recipe) -> bool:
        with _disable_current_modes(), below_autograd(), no_autocast():
            again = recipe.run({})
            living = [(again[n], value.memory()) for n, reference in recipe.outputs if (value := reference())]
            return all(memory is not None and same_storage_bits(tensor, memory) for tensor, memory in living)

    # -- backward ---------------------------------------------------------------------------------------------

    @module_calls.never_compiled
    def unpack(self, packed: Any) -> torch.Tensor:
        tensor = super().unpack(packed)
        if keeps_graph() and self._backward != graph_task():
            self._backward = graph_task()
            torch.autograd.Variable._execution_engine.queue_callback(self._drop_again)
        return tensor

    @module_calls.never_compiled
    def _drop_again(self) -> None:
        """A backward over a retained graph has ended: what it made goes, and the next one makes it again."""
        for value in sorted(self._holdings, key=lambda v: -v.number):  # readers first: what they read is there
            if value.remade and value.tensor is not None and value.is_needed and chain_of([value]) is not None:
                self._holdings.release(value)


class _CountedWrites(Writes):
    """What they keep is counted, what they complete is proven, and autograd sees them as without a tape."""

    def __init__(self, tape: DroppingTape, *of_step: Any) -> None:
        super().__init__(*of_step)
        self._tape: Callable[[], DroppingTape | None] = weakref.ref(tape)

    def note(self, op: RunningOp, seconds: float) -> None:
        storages = [storage for tensor in op.written if (storage := storage_of(tensor)) is not None]
        if any(s in self.outside or value_of_storage(s, self._run) is not None for s in storages):
            self._of_tape.num_fixed += 1
        super().note(op, seconds)

    def _complete(self, op: RunningOp, value: StoredValue, version: int, seconds: float) -> bool:
        was_blank = value.why_kept == UNINITIALISED
        if not super()._complete(op, value, version, seconds):
            return False
        recipe = value.recipe
        assert recipe is not None
        if not value.why_kept and not self._of_tape.is_proven(op, recipe):
            value.recipe, value.why_kept = None, "another run gives other bits"
        self._of_tape.num_fixed += bool(value.why_kept) - was_blank - 1  # as the write was counted
        return True

    def keep_what_reads(self, targets: list[torch.Tensor]) -> None:
        """Before a write, what autograd stored of this memory is held: as in plain autograd, it sees the write."""
        super().keep_what_reads(targets)
        for tensor in targets:
            value = value_of_storage(storage_of(tensor), self._run)
            if value is not None and id(value) in self._holdings.released:
                self._holdings.restore(value, memory_of(tensor))

    @property
    def _of_tape(self) -> DroppingTape:
        tape = self._tape()
        assert tape is not None  # it runs an op
        return tape


class _AnyRoom(ExpectedBytes):
    """Where there is no budget, nobody has to know what an op takes."""

    def of(self, key: Key, func: Any, args: tuple, kwargs: dict[str, Any]) -> int:
        return 0


class _Remaker(Releaser):
    """Lets nothing go, and makes again what the scope that backward is in needs."""

    def __init__(self, holdings: Holdings, live: LiveBytes, outer: list[frozenset[int]]) -> None:
        super().__init__(holdings, live, math.inf)
        self._outer = outer

    def stays(self, value: StoredValue, target: StoredValue) -> bool:
        return value.layer in self._outer[target.layer]


def _kind_of(argument: Any) -> Any:
    """What decides an op's kernel, of one argument: of a tensor not its values but how it lies in memory."""
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.storage_offset(), argument.dtype, argument.device
    if isinstance(argument, (list, tuple)):
        return tuple(map(_kind_of, argument))
    return type(argument), argument
