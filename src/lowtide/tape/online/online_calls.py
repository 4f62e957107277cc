"""Calls of autograd Functions whose kernels no dispatcher sees, as ops of a step without a plan.

The operators that such a call shows are seen as any others. When it returns, and before autograd stores anything: did
those operators make all that it returned and stores? Then they stay. If not, the whole call is the recipe of all of
that. The first call of a kind is compared bit by bit and runs again at once. A call that must not run again is saved,
and a reason names it. A release then proves each call once more, as it does any op.
"""

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import nn
from torch._C import _AutoDispatchBelowADInplaceOrView as below_autograd
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.device.generators import GeneratorStates
from lowtide.step.data_assignments import DataAssignedError
from lowtide.step.execution_state import ExecutionState
from lowtide.step.function_calls import (
    TRANSPARENT,
    UNSETTLED,
    CallOfFunction,
    Finished,
    ObservedFunctionCall,
    ReportingFunctions,
    run_again,
    stored_and_returned,
    why_not_same,
)
from lowtide.step.kinds_of_calls import Kind, KnownKinds
from lowtide.step.operators import fingerprint, storage_of, tensors_in
from lowtide.step.subclasses import plain_tensors
from lowtide.tape.online.known_proofs import KnownProofs
from lowtide.tape.online.live_bytes import LiveBytes
from lowtide.tape.online.online_values import Recipe, StoredValue, UnreadableError, value_of_storage
from lowtide.tape.online.release import Releaser
from lowtide.tape.online.writes import Writes

# Verdicts, beside other reasons why what a call makes is kept, and "".
_WRITES = frozenset({"writes its inputs in place", "writes in place without saying so"})


class TapeOfCalls(Protocol):
    """What a call asks of the online tape that sees it."""

    problem: str
    known_calls: "KnownCalls"
    running_call: "OnlineCall | None"
    releaser: Releaser
    writes: Writes

    @property
    def model(self) -> nn.Module | None: ...
    @property
    def run_state(self) -> ExecutionState: ...
    @property
    def number(self) -> int: ...
    def next_number(self) -> int: ...
    def new_value(self, storage: torch.UntypedStorage, version: int) -> StoredValue: ...
    def give_up(self, error: Exception) -> None: ...
    def note_reads_of_op(self, tensors: Iterable[torch.Tensor]) -> None: ...
    def note_written_unseen(self, tensor: torch.Tensor) -> None: ...
    def make_room_for_call(self, size: int) -> None: ...


class KnownCalls:
    """What calls of Functions have shown so far; outlives a step.

    Attributes:
        functions: Their subclasses that tell when they return.
        kept: Of Functions that must not run again: name and why.
        proven_anew: Names of those that are given other numbers all the time.
        proofs: Of operators.
        operators: What was found of those that are none of PyTorch's own.
    """

    def __init__(self) -> None:
        self.functions = ReportingFunctions()
        self.kept: dict[str, str] = {}
        self.proven_anew: set[str] = set()
        self.proofs = KnownProofs()
        self.operators = KnownKinds(many_places=True)
        self._kinds = KnownKinds(many_places=True)

    def verdict(self, kind: Kind) -> str | None:
        """Why what calls of this ``kind`` make is kept; None if that is not known."""
        return self._kinds.verdict(kind)

    def learn(self, kind: Kind, name: str, verdict: str) -> None:
        self._kinds.learn(kind, verdict)
        if verdict not in ("", TRANSPARENT):
            self.kept[name] = verdict
        elif verdict != TRANSPARENT and self._kinds.is_never_the_same(kind):
            self.proven_anew.add(name)


class CallRecipe(Recipe):
    """A call of a Function, ready to run again: what it stores and what it returned are its outputs, in this order."""

    __slots__ = ("_name",)

    def __init__(
        self,
        name: str,
        how: CallOfFunction,
        tensors: Sequence[torch.Tensor],
        generators: GeneratorStates | None,
        run: ExecutionState,
    ) -> None:
        """Raises: UnreadableError: an argument cannot be named."""
        super().__init__(run_again, (how, *tensors), {}, generators, run)
        self._name = name

    @property
    def name(self) -> str:
        return self._name


class OnlineCall(ObservedFunctionCall):
    """A call that leaves a recipe when it returns, whoever else observes it."""

    __slots__ = (
        "_before",
        "_call",
        "_first_op",
        "_generators",
        "_given",
        "_inspecting_s",
        "_kind",
        "_reads_aside",
        "_seen",
        "_start_s",
        "_tape",
        "_verdict",
        "_written",
        "live",
    )  # fmt: skip

    def __init__(self, tape: TapeOfCalls, call: ObservedFunctionCall) -> None:
        super().__init__(call.function, call.args)
        self.tensors = call.tensors
        self._tape, self._call = tape, call
        self._given = {_address(t) for t in (*tensors_in(self.args), *self.tensors, *self.how.owned)}
        self.live = LiveBytes()  # what its own operators make, while it runs
        self._first_op = 0
        self._start_s = self._inspecting_s = 0.0
        self._reads_aside = False
        self._before: list[tuple[int, ...]] | None = None  # fingerprints of its inputs; where it is looked at
        self._seen: dict[
            int | None, tuple[int, ...]
        ] = {}  # of what its operators made, by the storage's address; likewise
        self._written: set[int] = set()  # addresses of storages that its operators wrote

    @property
    def name(self) -> str:
        return self._call.name

    @property
    def is_unseen(self) -> bool:
        return self._call.is_unseen

    @property
    def is_settled(self) -> bool:
        return self._call.is_settled

    @property
    def peak_bytes(self) -> int:
        return self._call.peak_bytes

    @property
    def how(self) -> CallOfFunction:
        return self._call.how

    def run(self) -> Any:
        return self._run(self._tape.known_calls.functions, None)

    def run_watched(self, watched: ReportingFunctions, finished: Finished) -> Any:
        return self._run(watched, finished)

    def _run(self, watched: ReportingFunctions, other: Finished | None) -> Any:
        tape = self._tape
        self._kind = self.how.kind(self.args)
        self._verdict = tape.known_calls.verdict(self._kind)
        if self._verdict == TRANSPARENT:
            return self._call.run() if other is None else self._call.run_watched(watched, other)

        def finished(ctx: Any, output: Any) -> None:
            tape.running_call = None
            try:
                if not tape.problem:
                    self._finish(ctx, output)
                    if other is not None and self._call.may_compile and self.why_kept == "":
                        self.seconds = min(self.seconds or math.inf, self._uncompiled_s())
            except Exception as error:  # nothing of ours may end the step
                tape.give_up(error)
            if other is not None:  # now that it is known what the call is
                other(ctx, output)

        with ExitStack() as around:
            try:
                self._begin(around)
            except DataAssignedError:  # whatever came of it would be wrong
                raise
            except Exception as error:
                tape.give_up(error)
            try:
                return self._call.run_watched(watched, finished)
            finally:
                tape.running_call = None

    def _begin(self, around: ExitStack) -> None:
        """Note what there is before the call; what is to be closed behind it goes onto ``around``."""
        tape = self._tape
        with _disable_current_modes():
            self._generators = GeneratorStates(self.tensors)
            if self._verdict is None or self._verdict in _WRITES:
                around.enter_context(tape.writes.expected(self.tensors))
                self._before = [fingerprint(t) for t in tensors_in(self.args)]
            if peak_bytes := self.peak_bytes:
                tape.make_room_for_call(peak_bytes)
        tape.note_reads_of_op(self.tensors)
        self._first_op = tape.number
        tape.running_call = self
        self._start_s = time.perf_counter() - self._own_work_s()

    def _own_work_s(self) -> float:
        return self._inspecting_s + self._tape.releaser.proof_s + self._tape.releaser.replay_s

    # -- what its operators do ----------------------------------------------------------------------------------

    def note_op(self, args: tuple, result: Any, written: Sequence[torch.Tensor]) -> None:
        """An operator has run inside."""
        start = time.perf_counter()
        self._inspect_op(args, result, written)
        self._inspecting_s += time.perf_counter() - start

    def _inspect_op(self, args: tuple, result: Any, written: Sequence[torch.Tensor]) -> None:
        for tensor in tensors_in(args):
            value = value_of_storage(storage_of(tensor), self._tape.run_state)
            if value is not None and value.number <= self._first_op and _address(tensor) not in self._given:
                self._reads_aside = True
        for tensor in (*written, *tensors_in(result)):
            storage = storage_of(tensor)
            if storage is None:
                continue
            is_written = any(tensor is w for w in written)
            if is_written:
                self._written.add(storage._cdata)
            elif self._is_older(storage):
                continue
            is_new = storage not in self.live  # though one that is gone may have had its address
            if is_new:
                self.live.add(storage)
            # Not of a view, which may be taken when a kernel has written.
            if self._before is not None and (is_written or is_new):
                with _disable_current_modes():
                    self._seen[storage._cdata] = fingerprint(tensor)

    def _is_older(self, storage: torch.UntypedStorage) -> bool:
        """Whether ``storage`` was there before the call, as far as the tape knows."""
        value = value_of_storage(storage, self._tape.run_state)
        return value is None or value.number <= self._first_op

    # -- when it has returned ------------------------------------------------------------------------------------

    def _finish(self, ctx: Any, output: Any) -> None:
        tape = self._tape
        self.seconds = time.perf_counter() - self._own_work_s() - self._start_s
        results = stored_and_returned(ctx, output)
        changed = self._changed_inputs()
        if self._verdict is None and not self.is_settled:
            self._verdict = UNSETTLED
        if self._verdict is None:
            with _disable_current_modes():
                self._verdict = self._judge(ctx, results, changed)
            tape.known_calls.learn(self._kind, self.name, self._verdict)
        self.why_kept = self._verdict
        for tensor in changed:
            tape.note_written_unseen(tensor)
        if self._verdict == TRANSPARENT:
            return
        recipe, why = None, self._verdict
        if not why:
            with _disable_current_modes():  # views that a recipe takes are no ops of the step
                has_drawn = self._generators.have_moved()
                try:
                    recipe = CallRecipe(
                        self.name, self.how, self.tensors, self._generators if has_drawn else None, tape.run_state
                    )
                except UnreadableError as error:
                    why = str(error)
        self._leave(results, recipe, why)

    def _uncompiled_s(self) -> float:
        """What another run takes as a replay, without a compiler; longer than compiled by a half, at most."""
        tape = self._tape
        tape.make_room_for_call(max(self.live.peak, self.peak_bytes))
        with _disable_current_modes(), below_autograd(), torch._C._DisableAutocast(), self._generators.restored():
            with self._call.uncompiled():
                start = time.perf_counter()
                run_again(self.how, *self.tensors)
                return time.perf_counter() - start

    def _changed_inputs(self) -> list[torch.Tensor]:
        """Those that have changed though no operator wrote them."""
        if self._before is None:
            return []
        with _disable_current_modes():
            pairs = [(t, b, fingerprint(t)) for t, b in zip(tensors_in(self.args), self._before, strict=True)]
        return [t for t, before, now in pairs if now != before and now != self._seen.get(_address(t))]

    def _judge(self, ctx: Any, results: list[torch.Tensor], changed: list[torch.Tensor]) -> str:
        """Why what calls of this kind make is kept, "" or ``TRANSPARENT``."""
        if not self.how.stays_whole and not changed and all(map(self._is_explained, results)):
            return TRANSPARENT
        if {_address(t) for t in changed} - {_address(t) for t in ctx.dirty_tensors or ()}:
            return "writes in place without saying so"
        restored = {_address(t) for t in self.how.restores}
        if ctx.dirty_tensors or (self._given - restored) & self._written:
            return "writes its inputs in place"
        if self._reads_aside:
            return "reads what it is not given"
        if reason := self.how.why_not_again():
            return reason
        tape, model = self._tape, self._tape.model
        made = {
            s._cdata: s.nbytes() for t in results if (s := storage_of(t)) is not None and s._cdata not in self._given
        }
        tape.make_room_for_call(max(self.live.peak, sum(made.values())))
        buffers = [] if model is None else list(plain_tensors(*model.buffers()))
        return why_not_same(self.how, self.tensors, results, self._generators, buffers, own_memory=True)

    def _is_explained(self, tensor: torch.Tensor) -> bool:
        """Whether the operators that were seen made what is in ``tensor``."""
        storage = storage_of(tensor)
        value = value_of_storage(storage, self._tape.run_state)
        if value is None or storage is None:
            return _address(tensor) in self._given
        if value.number <= self._first_op:
            return True
        return value.recipe is not None and not value.why_kept and self._seen.get(storage._cdata) == fingerprint(tensor)

    def _leave(self, results: list[torch.Tensor], recipe: CallRecipe | None, why: str) -> None:
        """``recipe`` makes what the call made, or that is kept for ``why``."""
        tape = self._tape
        made: list[tuple[int, StoredValue]] = []
        number = tape.next_number()
        for position, tensor in enumerate(results):
            storage = storage_of(tensor)
            if storage is None or storage._cdata in self._given or any(v.storage() is storage for _, v in made):
                continue
            value = value_of_storage(storage, tape.run_state)
            if value is None:  # NumPy's memory, which no operator made
                value = tape.new_value(storage, tensor._version)
            elif value.number <= self._first_op:
                continue
            value.number, value.version, value.cost_s = number, tensor._version, self.seconds or 0.0
            value.recipe, value.why_kept = recipe, why
            made.append((position, value))
        if recipe is not None and made:
            recipe.take_outputs(made, max(self.live.peak, self.peak_bytes))
            tape.writes.outside.note(recipe)


def _address(tensor: torch.Tensor) -> int | None:
    storage = storage_of(tensor)
    return None if storage is None else storage._cdata
