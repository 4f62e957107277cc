"""The tape carries a plan out: it drops outputs in the forward pass and replays them when backward needs them.

A dispatch mode sees each op below autograd and autocast, and leaves a recipe where the plan drops an output. A pair of
saved-tensor hooks gives autograd a placeholder for each dropped tensor, and each kept tensor with its version. Ops are
matched by name and order within their module call; an op that does not match is saved and counted. If
``on_divergence`` is set, the online tape that it returns takes over the rest of the region.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C import _current_graph_task_id as graph_task
from torch._C import _storage_Use_Count as use_count
from torch._C._autograd import _top_saved_tensors_default_hooks as top_hooks
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.device import planned_ops
from lowtide.device.autocast import casting_inside, with_autocast
from lowtide.device.dispatch import bytes_of
from lowtide.device.generators import GeneratorStates
from lowtide.errors import TierError
from lowtide.step import module_calls, optimizer_steps
from lowtide.step.backward_entry import in_last_backward, is_autograds_own
from lowtide.step.bits import same_bits
from lowtide.step.execution_state import ExecutionState, GeneratorState
from lowtide.step.function_calls import ObservedFunctionCall, stored_and_returned
from lowtide.step.operators import (
    allocated_bytes,
    draws_random_numbers,
    fills_its_storage,
    fingerprint,
    is_opened_type,
    is_wrapper_type,
    may_run_others,
    storage_of,
    written_arguments,
    written_tensors,
)
from lowtide.step.seam import SwitchedMode, step_aside
from lowtide.step.sharding.observer import PauseDuringSharding
from lowtide.step.storage_bits import Seal, SealsOnDevice, seals_on, sum_of_words
from lowtide.step.subclasses import PackedWrapper, bump_versions_of_parts, fake_mode_is_on, wrapped_parameters
from lowtide.tape import plain_derivatives
from lowtide.tape.calls_under_plan import CallUnderPlan
from lowtide.tape.followed_ops import FollowedOps
from lowtide.tape.offload.offloaded_tensor import OffloadedTensor, Transfers
from lowtide.tape.offload.tiers import Tiers
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.planned_bytes import PlannedBytes
from lowtide.tape.program import PlanProgram, TapedCall, TapedOp
from lowtide.tape.proof_at_birth import run_twice
from lowtide.tape.recipes import Recipe, nth_tensor
from lowtide.tape.replay import replay_readers, unpacked
from lowtide.tape.values import (
    MARK,
    Kept,
    Value,
    View,
    detached,
    is_view_of_leaf,
    modified_in_place,
    placeholder_for,
    sharing_version,
    unmark_written,
    value_of,
)

# References to the memory of a tensor that nothing else holds: its own and that of the storage's Python object.
_UNSHARED_REFERENCES = 2
_SEALED_STEPS = 16  # in so many steps each dropped tensor is compared once with what its replay gives


@dataclass
class Counts:
    """What the tape did, over all steps.

    Attributes:
        steps: Forward passes taped.
        dropped: Tensors replaced by recipes.
        moved: Tensors moved to another tier.
        mismatched: Planned ops that did not run, ran in another form, or could not be dropped: saved instead.
        unplanned: Ops that are not in the plan (of a loss outside the model, for example): saved.
    """

    steps: int = 0
    dropped: int = 0
    moved: int = 0
    mismatched: int = 0
    unplanned: int = 0


class _OpenCall:
    """A module call that is running."""

    __slots__ = ("calls", "hooks", "next", "num_calls", "path", "planned", "unobserved", "watches")

    def __init__(self, planned: TapedCall | None) -> None:
        self.planned = planned
        self.path = ""  # once the plan has ended in it
        # Whether it needs mode and hooks. None: it runs only calls, which say it themselves.
        self.watches: bool | None = True
        self.hooks: bool | None = True
        self.unobserved = False  # nobody needs to know of the module calls in it
        self.next = 0  # index of the planned op that is expected next
        self.num_calls = 0  # module calls in it so far
        self.calls: Counter[str] | None = (
            None  # how often each child module has been called, once that is not as planned
        )


class Tape(SwitchedMode):
    """One program on one model. ``TapedRegion`` (attach.py) puts it in place.

    Attributes:
        sizes_vary: The plan is for larger batches than this step's: sizes need not be those planned.
        proves_at_birth: If set, an op that is not proven yet runs twice, and is dropped only if both give the same
            bits; called with the ops that differ.
        rehearses: Every replay is compared with what it replaces, without keeping that: its fingerprint is taken when
            its memory goes. ``proves_at_birth`` is called with the ops that differ, and backward goes on.
        on_other_numbers: If set, called with the calls of Functions that are proven in each step.
        on_refusal: If set, called where a tier has no room for a tensor, which then stays; else that is an error.
        on_divergence: If set, called once in a region that runs other ops than planned, with the number of the last
            planned op that ran (-1: none). What runs from there on is not the plan's any more: the online tape that it
            returns, which is in place when it returns, sees it. Where it returns None, it is saved.
        matches_all: Every op is matched, also where nothing is to be done.
        planned_bytes: What lives as planned. If more does, the plan ends as where other ops run.
        seals: On a device: those of all forward passes, once something is sealed there.
        proved: Ops of the present forward pass were proven in memory that the plan does not know.
    """

    def __init__(self, program: PlanProgram, model: nn.Module, tiers: Tiers | None = None) -> None:
        super().__init__()
        plain_derivatives.watch()
        self.program = program
        self.tiers = tiers or {}
        self._transfers: Transfers | None = None  # of the present forward pass, if the plan moves anything
        self._model = weakref.ref(model)
        self.counts = Counts()
        self.sizes_vary = False
        self.proves_at_birth: Callable[[TapedOp], None] | None = None
        self.rehearses = False
        self.on_other_numbers: Callable[[TapedOp], None] | None = None
        self.on_refusal: Callable[[TierError], None] | None = None
        self.on_divergence: Callable[[int], OnlineTape | None] | None = None
        self.matches_all = False
        self.planned_bytes: PlannedBytes | None = None
        self.proved = False
        self.seals: SealsOnDevice | None = None
        self._diverged_after: int | None = None  # the last op that ran as planned
        self._told = False  # ``on_divergence`` has been called
        self._online: OnlineTape | None = None  # what it returned
        self._recipes: list[weakref.ref[Recipe]] = []  # of the present forward pass
        self._only_counts = False  # it drops nothing, and matches no op: what the step holds is all that matters
        self._call = _OpenCall(None)
        self._callers: list[_OpenCall] = []
        self._marked: list[weakref.ref] = []
        # In rehearsals, what is dropped when the step lets go of it. No aliases: some calls look for those.
        self._to_seal: list[torch.UntypedStorage] = []
        self._run = ExecutionState(self._model)  # of the present forward pass
        self._outer_hooks: Any = None
        self._next_number = 0
        self._pauses = 0
        self._backward_began = False  # in a region that holds whole steps
        self._whole_step = self._ends_at_unpack = False
        self._wrapped = bool(wrapped_parameters(model))
        self._followed: FollowedOps | None = None  # of the present forward pass; None: every op is looked at here

    # -- regions ------------------------------------------------------------------------------------------------

    def enter_region(self, call: TapedCall, *, whole_step: bool) -> None:
        """A region of ``call`` opens, inside the hooks that others have in place now."""
        self.start_here()
        self._whole_step = self._ends_at_unpack = whole_step
        self._outer_hooks = top_hooks(True)
        self.begin(call)
        if not whole_step:  # else any op outside the model may be one of the step
            self._need_less(self._call, call)
        self._switch_for(self._call)
        self._follow(self._call)

    def enter_step(self) -> None:
        """A region of the whole step opens where the model is first called from outside.

        It is left before its backward; another model's may come before that.
        """
        self._whole_step, self._ends_at_unpack, self._outer_hooks = True, False, None
        self.begin(self.program.root)
        self._call.next = self.program.num_ops_before_model
        self.watches = self.hooks = True  # a seam has put them there
        self._follow(self._call)

    def leave_region(self, *, failed: bool) -> None:
        """The region closes; ``failed``: with an exception, which may have left module calls open."""
        if self._followed is not None:
            self._followed.end()
        while self._callers:
            self._call = self._callers.pop()
        if not failed and not self._backward_began:
            self._close(self._call)
            if self._diverged_after is not None:
                self._leave_plan()
        if failed and self._transfers is not None:
            self._transfers.forget()
        self.take_away()  # last: a step that ends short of its plan has put them in place
        self.end()
        self._outer_hooks = None

    def settle_copies(self) -> None:
        """What is on its way to another tier arrives, and goes from the device. Raises: TierError: a copy failed."""
        if self._transfers is not None:
            self._transfers.settle_all()

    def begin(self, call: TapedCall) -> None:
        """A new forward pass starts."""
        self._call, self._callers = _OpenCall(call), []
        self._region, self._diverged_after, self._told, self._recipes = call, None, False, []
        self._online = None
        self._only_counts = self.program.keeps_everything and not (self.matches_all or self.rehearses)
        if self.planned_bytes is not None:
            self.planned_bytes.begin_call(call)
        self.proved = False
        self._run = ExecutionState(self._model, wrapped=self._wrapped)
        if self.seals is not None:
            self.seals.begin_step()
        self._run.knows_passes = self.program.knows_passes
        self.program.run_under(self._run.flags)
        if self.rehearses:
            self._run.on_difference = self.proves_at_birth
        self._next_number = 0
        self._backward_began = False
        self._start_following()
        if self.program.moves_anything:
            self.settle_copies()  # of the last one, whose backward is still to come, or never comes
            self._transfers = Transfers(self.tiers, self.program.max_inflight_bytes)
        self.counts.steps += 1

    def end(self) -> None:
        """The forward pass is over: storages that still live stop holding their recipes, which hold kept tensors."""
        self._seal_unheld(all_of_them=True)
        for reference in self._marked:
            storage = reference()
            if storage is not None:
                storage.__dict__.pop(MARK, None)
        self._marked = []

    # -- module calls -------------------------------------------------------------------------------------------

    def enter(self, path: str) -> None:
        if self._backward_began and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._next_step()
        followed = self._catch_up()
        caller = self._call
        planned = None
        if caller.planned is not None:
            upcoming, at = caller.planned.sequence, caller.num_calls
            if caller.calls is None and at < len(upcoming) and upcoming[at].path == path:
                planned = upcoming[at]
                caller.num_calls = at + 1
            else:
                planned = self._out_of_order(caller, caller.planned, path)
        if not (followed and planned is not None) and self._holds_too_much(planned):
            planned = None
        if self._diverged_after is not None:
            self._leave_plan()
            if self._online is not None:
                self._online.go_on_inside((path,))
        self._callers.append(caller)
        self._call = call = _OpenCall(planned)
        if self._to_seal:
            self._seal_unheld()
        if planned is not None:
            self._need_less(call, planned)
            rises = self.planned_bytes is not None and self.planned_bytes.rises_in(planned)
            if not (call.watches or planned.has_actions_inside or rises):
                call.unobserved = True
                module_calls.thread_state.observer = None  # until ``leave``
        if call.watches is not self.watches or call.hooks is not self.hooks:
            self._switch_for(call)
        self._follow(call)

    def _out_of_order(self, caller: _OpenCall, plan: TapedCall, path: str) -> TapedCall | None:
        """What is planned for the call of ``path`` that begins in ``caller``, which is not the one that was to come."""
        called = caller.calls
        if called is None:
            called = caller.calls = Counter(call.path for call in plan.sequence[: caller.num_calls])
        calls = plan.children.get(path, ())
        planned = calls[called[path]] if called[path] < len(calls) else None
        if (planned is None or planned.position != caller.num_calls) and self._diverge():
            planned = None
        called[path] += 1
        caller.num_calls += 1
        return planned

    def leave(self) -> None:
        followed = self._catch_up()
        call = self._call
        if call.unobserved:
            module_calls.thread_state.observer = self
        else:
            self._close(call)
        if self._online is not None:
            self._online.leave_outer()
        self._call = caller = self._callers.pop()
        if not followed and self._holds_too_much(call.planned, ended=True):
            self._leave_plan()
        if caller.watches is not self.watches or caller.hooks is not self.hooks:
            self._switch_for(caller)
        self._follow(caller)

    def _holds_too_much(self, call: TapedCall | None, *, ended: bool = False) -> bool:
        """Whether so much more than planned lives where ``call`` begins, or has ended, that the plan ends here."""
        planned = self.planned_bytes
        if planned is None or self._diverged_after is not None:
            return False
        if call is None or call.last_op < 0:
            passed = planned.is_full()
        else:
            passed = planned.is_passed(call.last_op if ended else call.first_op, has_run=ended)
        return passed and self._diverge(passed=True)

    def _switch_for(self, call: _OpenCall) -> None:
        if call.watches is not None and call.hooks is not None:
            self.switch(watches=call.watches, hooks=call.hooks)

    def _need_less(self, call: _OpenCall, planned: TapedCall) -> None:
        """Where nothing is to be done for any op of ``call`` itself, let them cost what they cost in the plain step.

        Hooks stay where a dropped tensor from outside may be saved, and everywhere if tensors move: each unpack counts,
        since copies settle and fetches start at those that the plan names.
        """
        if self._only_counts:
            call.watches = call.hooks = False
        elif not (self._wrapped or self._pauses or self.rehearses or self.matches_all):
            if planned.ops or not planned.has_actions_inside:
                # The mode costs more to take away than it does to ops that run without us.
                stays = self._followed is not None and self.watches and planned.is_small
                call.watches = planned.has_actions or stays
                call.hooks = planned.needs_hooks or self.program.moves_anything
            else:
                call.watches = call.hooks = None

    def _close(self, call: _OpenCall) -> None:
        """No more ops of ``call`` are expected: planned ones that did not run are counted."""
        planned = call.planned
        if planned is None or call.unobserved:
            return
        if (planned.has_actions or self.matches_all) and call.next < len(planned.ops):
            missing = sum(bool(op.drops or op.moves) for op in planned.ops[call.next :])
            # A loss that is made between two backward passes over the same graph comes when the region is left.
            if missing or not (self.program.knows_passes and planned is self.program.root):
                self._diverge()
            self.counts.mismatched += missing
            self._advance(call, len(planned.ops))
        elif call.num_calls != len(planned.sequence):
            self._diverge()

    # -- ops that run without us --------------------------------------------------------------------------------

    def _start_following(self) -> None:
        """Of a forward pass that begins: its ops with nothing to be done may run without us."""
        if self._only_counts or self._wrapped or self.rehearses or self.matches_all or not planned_ops.is_there():
            self._followed = None
            return
        if self._followed is None:
            self._followed = FollowedOps(self)
        self._followed.start_here(self.program, self.planned_bytes)

    def _follow(self, call: _OpenCall) -> None:
        """From here on the ops that are to come are those of ``call``."""
        if self._followed is None:
            return
        planned = call.planned
        if planned is not None and call.watches and planned.ops and not (self._pauses or self._backward_began):
            self._followed.begin(call, planned)
        else:
            self._followed.end()

    def _catch_up(self) -> bool:
        """With what ran without us; whether ops may have, before each of which what lives was looked at."""
        followed = self._followed
        if followed is None or not followed.is_on:
            return False
        followed.catch_up()
        return True

    def _advance(self, call: _OpenCall, at: int) -> None:
        """The op of ``call``, the innermost one, that is to come is the one at ``at``."""
        call.next = at
        if self._followed is not None:
            self._followed.advance()

    # -- other ops than planned ---------------------------------------------------------------------------------

    def _diverge(self, *, passed: bool = False) -> bool:
        """The region runs other ops than planned, or has ``passed`` what may live: whether the plan ends here.

        Where it keeps everything, other ops alone are no reason.
        """
        if self.on_divergence is None or (self._only_counts and not passed):
            return False
        if self._diverged_after is None:
            self._diverged_after = self._last_op()
            ours = not self._only_counts  # else no recipe of ours is to be seen to
            for call in (*self._callers, self._call):
                call.path = call.planned.path if call.planned is not None else ""
                call.planned, call.watches, call.hooks = None, ours, ours
            self.switch(watches=ours, hooks=ours)
            self._follow(self._call)
        return True

    def _last_op(self) -> int:
        """The number of the last planned op that has run."""
        region = self._region
        last = region.first_op - 1 if region.last_op >= 0 else len(self.program.ops) - 1
        open_calls = [*self._callers, self._call]
        for call, inner in zip(open_calls, [*open_calls[1:], None]):
            if call.planned is None:
                continue
            if call.planned.has_actions or self.matches_all:
                ran = call.planned.ops[: call.next]
            else:  # its ops were not followed: those before the call that runs, or that was to come next
                upcoming = call.planned.sequence[call.num_calls - (inner is not None) :]
                ran = [op for op in call.planned.ops if not upcoming or op.number < upcoming[0].first_op]
            last = max([last, *(op.number for op in ran)])
            over = call.planned.sequence[: call.num_calls - (inner is not None)]
            last = max([last, *(c.last_op for c in over)])
        return last

    def _leave_plan(self) -> None:
        """The online tape, if there is one, sees what runs from here on; what was dropped stays ours."""
        if self._told or self.on_divergence is None or self._diverged_after is None:
            return
        self._told = True
        online = self.on_divergence(self._diverged_after)
        if online is not None:
            if module_calls.thread_state.observer is self:
                module_calls.thread_state.observer = online
            online.go_on_inside(call.path for call in (*self._callers, self._call))
            self._online = online
            self._outer_hooks = self._outer_hooks or (online.pack, online.unpack)

    def opaque(self, path: str, module: nn.Module, run: Callable[[], Any], inputs: list[torch.Tensor]) -> Any:
        """A call of compiled code: its operators are not seen, and what autograd stores of it is kept."""
        self.enter(path)
        try:
            with _disable_current_modes():
                return run()
        finally:
            self.leave()

    def pause(self) -> None:
        """What runs until ``resume`` is not part of the step (a pass without gradients, for example)."""
        self._pauses += 1
        self._follow(self._call)

    def resume(self) -> None:
        self._pauses -= 1
        self._follow(self._call)

    @property
    def sharding_observer(self) -> PauseDuringSharding:
        """Pauses the tape while parameters are gathered and freed, which is not part of the step."""
        return PauseDuringSharding(self)

    def _recipe_number(self) -> int:
        number = self._next_number
        if number == 0:
            # An op in front of ``optimizer.step()`` may have begun this pass: nothing of it has been read before now.
            self._run.steps_before = optimizer_steps.count
        self._next_number += 1
        return number

    def _next_step(self) -> None:
        self.end()
        self.begin(self.program.root)

    # -- operators ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if types and not fake_mode_is_on() and any(map(is_opened_type, types)):
            # Ops on the parts of a wrapper are dispatched again.
            bump_versions_of_parts(func, args, kwargs or {})
            return NotImplemented
        if may_run_others(func) and (casting := casting_inside()) is not None:
            with casting:
                return self.__torch_dispatch__(func, types, args, kwargs)
        if self._to_seal:
            self._seal_unheld()
        if in_last_backward() or self._pauses or (self._wrapped and fake_mode_is_on()):
            return func(*args, **kwargs) if kwargs else func(*args)
        if self._backward_began:
            if not torch.is_grad_enabled():  # the optimizer's work between two steps
                return func(*args, **(kwargs or {}))
            self._next_step()
        call, followed = self._call, self._followed
        if followed is not None and followed.is_on:  # as ``_catch_up``: this runs for each op
            call.next = followed.position.next
        planned = call.planned
        if planned is not None:
            if not planned.has_actions and not self.matches_all:
                return func(*args, **kwargs) if kwargs else func(*args)
            if call.next < len(planned.ops):
                op = planned.ops[call.next]
                if (op.func is func or op.bind(func)) and not is_autograds_own(func):
                    bytes_now = self.planned_bytes
                    if bytes_now is not None and bytes_now.is_passed(op.number, has_run=False):
                        return self._run_beyond_plan(func, args, kwargs or {})
                    call.next += 1
                    if followed is not None and followed.is_on:
                        followed.position.next = call.next
                    if op.drops:
                        result = self._record(op, args, kwargs or {})
                    elif op.completes_inplace is not None:
                        result = self._record_inplace(op, args, kwargs or {})
                    else:
                        result = op.kernel(*args, **kwargs) if kwargs else op.kernel(*args)
                    if op.moves:
                        self._move(op, result, args)
                    return result
            if func.namespace == "profiler" or is_autograds_own(func):  # FSDP's labels are no ops of the step
                return func(*args, **(kwargs or {}))
            if self._callers or not self._whole_step:  # outside the model others may run besides, a metric or a log
                self._diverge()
                self._close(call)  # the rest of this module call is saved
        return self._run_unplanned(func, args, kwargs or {})

    def _run_beyond_plan(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """``func`` is the planned op, and too much lives: the plan ends before it."""
        self._diverge(passed=True)
        return self._run_unplanned(func, args, kwargs)

    def _run_unplanned(self, func: Any, args: tuple, kwargs: dict) -> Any:
        self.counts.unplanned += 1
        if self._diverged_after is not None:
            self._leave_plan()
            if written_arguments(func):
                self._replay_what_reads(written_tensors(func, args, kwargs))
        unmark_written(func, args, kwargs)
        return func(*args, **kwargs)

    def _replay_what_reads(self, targets: list[torch.Tensor]) -> None:
        """``targets`` are about to be written, of which the plan knows nothing: what it dropped may be made of them."""
        for target in targets:
            if (storage := storage_of(target)) is not None:
                replay_readers(storage, self._recipes)

    def _record(self, op: TapedOp, args: tuple, kwargs: dict) -> Any:
        """Run ``op`` and leave a recipe in place of the outputs to drop."""
        run = self._run
        recipe = Recipe(self._recipe_number(), op, args, kwargs, run)
        if not recipe.holds_dropped(op.num_dropped_inputs):
            self.counts.mismatched += 1  # the recipe would hold an input that the plan counts as freed
            self._diverge()
            return op.kernel(*args, **kwargs)
        if op.random and draws_random_numbers(op.func, args, kwargs):
            created_on = torch.device(kwargs.get("device") or "cpu")  # a factory has no tensor argument
            device = next((a.device for a in args if isinstance(a, torch.Tensor)), created_on)
            recipe.rng = GeneratorState(device)
        if op.runs_others:
            recipe.rng = with_autocast(recipe.rng)
        if self._is_to_be_proven(op):
            result = self._prove(op, args, kwargs, recipe.rng)
        else:
            result = op.kernel(*args, **kwargs) if kwargs else op.kernel(*args)
        if op.drops:
            self._drop(op, recipe, args, result)
        return result

    def _drop(self, op: TapedOp, recipe: Recipe, args: Sequence[Any], result: Any) -> None:
        """Leave ``recipe`` in place of those outputs of ``op`` that the plan drops."""
        single = len(op.drops) == 1
        outputs: list[weakref.ref[Value]] = []
        for output, size in op.drops:
            tensor = result if type(result) is torch.Tensor else nth_tensor(result, output)
            storage = tensor.untyped_storage()
            attributes = storage.__dict__
            varies = op.dynamic or self.sizes_vary
            if (
                (
                    not (varies or storage.nbytes() == size or allocated_bytes(storage) == size)
                    and not (size == 0 and _is_on_host(storage, args))
                )
                or MARK in attributes
                or (use_count(storage._cdata) > _UNSHARED_REFERENCES and _is_memory_of_argument(storage, args))
            ):
                self.counts.mismatched += 1
                self._diverge()
                continue
            if single:
                value: Value = recipe
                recipe.begin(output, tensor)
            else:
                value = Value(recipe, output, tensor, self._run)
                outputs.append(weakref.ref(value))
            attributes[MARK] = value
            self._marked.append(weakref.ref(storage))
            self.counts.dropped += 1
            is_sealed = self.proves_at_birth is not None and (recipe.number + self.counts.steps) % _SEALED_STEPS == 0
            if not (self.rehearses or is_sealed) or not fills_its_storage(tensor):
                continue  # a loss has as much memory as its terms: nobody wrote the rest
            if self.rehearses:
                self._to_seal.append(storage)
            else:
                value.seal = self._seal(tensor)
        if not single:
            recipe.outputs = outputs
        self._recipes.append(weakref.ref(recipe))

    def _seal(self, tensor: torch.Tensor) -> Seal:
        """A sum that a replay of ``tensor`` has to have; on a device nobody waits for it."""
        if self.seals is None:
            self.seals = seals_on(tensor.device)
        self._run.seals = self.seals
        return sum_of_words(tensor) if self.seals is None else self.seals.seal(tensor)

    def _is_to_be_proven(self, op: TapedOp) -> bool:
        return self.proves_at_birth is not None and not (op.proven or op.uninitialised)

    def _prove(self, op: TapedOp, args: tuple, kwargs: dict, rng: GeneratorState | GeneratorStates | None) -> Any:
        """The result of ``op``, which runs twice; if that gives other bits, it is saved from now on."""
        found = run_twice(op, args, kwargs, rng)
        op.proven = found.is_same
        self.proved |= found.held_both
        if not op.proven:
            self._give_up_dropping(op)
        return found.result

    def _give_up_dropping(self, op: TapedOp) -> None:
        """Another run of ``op`` gives other bits: it is saved from now on."""
        op.drops = ()
        self.counts.mismatched += 1
        if self.proves_at_birth is not None:
            self.proves_at_birth(op)

    def _seal_unheld(self, *, all_of_them: bool = False) -> None:
        """Take the seals of dropped tensors that only this tape holds any more, and let them go.

        Not at birth: what is written later without a version (``.data``, NumPy) is what plain autograd would read.
        """
        held: list[torch.UntypedStorage] = []
        for storage in self._to_seal:
            value = storage.__dict__.get(MARK)
            if not all_of_them and use_count(storage._cdata) > 1:
                held.append(storage)
            elif value is not None and value.users:
                with _disable_current_modes():
                    value.seal = fingerprint(bytes_of(storage))
        self._to_seal = held

    def _record_inplace(self, op: TapedOp, args: tuple, kwargs: dict) -> Any:
        """Run an in-place op on a dropped output; it becomes part of the recipe if nothing has read the output yet."""
        if MARK not in args[0].untyped_storage().__dict__:
            return op.func(*args, **kwargs)  # this output is kept; another output of the same op is dropped
        value = value_of(args[0], self._run)
        recipe = None if value is None else value.source
        # Whoever holds the Value (users) must get the tensor as it is now.
        if value is None or value.users or not isinstance(recipe, Recipe) or recipe.inputs_later_than(args[1:], kwargs):
            self.counts.mismatched += 1
            self._diverge()
            unmark_written(op.func, args, kwargs)
            return op.func(*args, **kwargs)
        rng = GeneratorState(args[0].device) if op.random else None
        if op.runs_others:
            rng = with_autocast(rng)
        second = None
        if self.proves_at_birth is not None and not op.proven:
            self.proved = True
            second = args[0].clone()
            with nullcontext() if rng is None else rng.restored():
                op.func(second, *args[1:], **kwargs)
        recipe.extend(op.func, args, kwargs, value, rng)
        result = op.func(*args, **kwargs)
        if value.seal is not None:
            value.seal = self._seal(args[0])
        if second is not None:
            op.proven = same_bits(second, args[0])
            if op.completes_inplace is not None and op.completes_inplace.uninitialised:
                op.completes_inplace.proven = op.proven
            if op.completes_inplace is not None and not op.proven:
                value.original = sharing_version(args[0])  # this time what was dropped stays beside its recipe
                self._give_up_dropping(op.completes_inplace)
        value.version += 1  # autograd counts this write when the call has returned; any other write makes them differ
        return result

    def function(self, call: ObservedFunctionCall) -> Any:
        """A call of a custom autograd Function, which may be planned as one op: then its own operators are not."""
        if self._backward_began and not self._pauses:
            self._next_step()
        self._catch_up()
        planned, at = self._call.planned, self._call.next
        if self._pauses or planned is None or not (planned.has_actions or self.matches_all) or at >= len(planned.ops):
            return call.run()
        op = planned.ops[at]
        if not op.is_call_of(call):
            return call.run()
        self._advance(self._call, at + 1)
        self.pause()
        try:
            if not (op.drops or op.moves):
                return call.run()
            running = CallUnderPlan(op, call)
            return call.run_watched(self.program.functions, partial(self._record_call, running))
        finally:
            self.resume()

    def _record_call(self, running: CallUnderPlan, ctx: Any, output: Any) -> None:
        """A call has returned, and autograd is about to store what it asks for: drop or move what is planned."""
        op, tensors = running.op, running.call.tensors
        results = stored_and_returned(ctx, output)
        last = max([*(output for output, _ in op.drops), *(move.output for move in op.moves)])
        if running.writes_inputs(ctx) or last >= len(results):
            self.counts.mismatched += 1
            self._diverge()
            return
        self.proved |= bool(op.drops) and running.is_to_be_proven
        is_proven = bool(op.drops) and running.is_proven(results, self._model())
        if is_proven and self.on_other_numbers is not None and running.is_never_the_same:
            self.on_other_numbers(op)
        if is_proven:
            recipe = Recipe(self._recipe_number(), op, (running.how, *tensors), {}, self._run)
            recipe.rng = running.generators_if_moved()
            if recipe.holds_dropped(op.num_dropped_inputs):
                self._drop(op, recipe, tensors, results)
            else:
                self.counts.mismatched += 1
                self._diverge()
        elif op.drops:
            self._give_up_dropping(op)
        if op.moves:
            self._move(op, results, tensors)

    def _move(self, op: TapedOp, result: Any, args: Sequence[Any]) -> None:
        """Start storing those outputs of ``op`` that are to be moved."""
        for move in op.moves:
            tensor = args[0] if op.moves_completed else nth_tensor(result, move.output)
            storage = tensor.untyped_storage()
            other_size = allocated_bytes(storage) != move.bytes and not op.dynamic
            alias = not op.moves_completed and _is_memory_of_argument(storage, args)
            if other_size or alias or MARK in storage.__dict__ or self._transfers is None:
                self.counts.mismatched += 1
                self._diverge()
                continue
            copy = OffloadedTensor(self._next_number, move, self._run)
            self._next_number += 1
            value = Value(copy, move.output, tensor, self._run)
            value.version += op.moves_completed  # autograd counts an in-place write when this call has returned
            copy.stand_for(value, tensor)
            if self.rehearses:
                self._to_seal.append(storage)
            if (refusal := self._transfers.send(copy, storage)) is not None:
                self._keep(refusal)
                continue
            setattr(storage, MARK, value)
            self._marked.append(weakref.ref(storage))
            self.counts.moved += 1

    def _keep(self, refusal: TierError) -> None:
        """A tier has no room for a tensor, which stays where it is."""
        if self.on_refusal is None:
            raise refusal
        self.on_refusal(refusal)
        self.counts.mismatched += 1
        self._diverge()

    # -- autograd -----------------------------------------------------------------------------------------------

    @module_calls.never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd holds for ``tensor``: a placeholder if it was dropped, else the tensor and its version."""
        is_parameter = type(tensor) is torch.nn.Parameter  # never dropped
        placeholder = None if is_parameter else placeholder_for(tensor, self._run)
        if placeholder is not None:
            return placeholder
        if self._outer_hooks is not None:
            return partial(self._outer_hooks[1], self._outer_hooks[0](tensor))
        if is_parameter or is_view_of_leaf(tensor):
            return Kept(tensor)
        # An op's own output gets its history only after this, and still looks like a leaf.
        return PackedWrapper(tensor, self.pack) if is_wrapper_type(type(tensor)) else Kept(detached(tensor))

    @module_calls.never_compiled
    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor that ``pack`` was given. Called by autograd inside backward.

        Raises:
            RuntimeError: a kept tensor was changed in place. Autograd's own check is off under hooks.
            ReplayError: a dropped tensor cannot be replayed exactly.
        """
        # A backward that creates a graph, which has grad mode on, is part of the forward pass.
        if torch.is_grad_enabled():
            step_aside()
        elif self._ends_at_unpack and not self._callers and not self._backward_began:
            self.end()
            self._backward_began = True
            self._follow(self._call)
        if self._transfers is not None and graph_task() != -1:
            self._transfers.on_unpack()
        kind = type(packed)
        if kind is Recipe:
            # Mostly an earlier burst has run its final replay.
            return packed.tensor if packed.args is None and packed.tensor is not None else unpacked(packed)
        if kind is View or kind is Value:
            return unpacked(packed)
        if kind is Kept:
            if packed.changed():
                raise modified_in_place(packed.tensor, packed.tensor.shape, packed.version)
            return packed.tensor
        return packed.unpack(self.unpack) if kind is PackedWrapper else packed()


def _is_on_host(storage: torch.UntypedStorage, args: Sequence[Any]) -> bool:
    """Made on the CPU by an op on an accelerator's tensors: it counts as 0 bytes of the accelerator."""
    return storage.device.type == "cpu" and any(isinstance(a, torch.Tensor) and not a.is_cpu for a in args)


def _is_memory_of_argument(storage: torch.UntypedStorage, args: Sequence[Any]) -> bool:
    """The op returned memory of an argument: an alias that its schema may not declare."""
    try:
        for argument in args:
            # A storage has one Python object only.
            if isinstance(argument, torch.Tensor) and argument.untyped_storage() is storage:
                return True
    except (NotImplementedError, RuntimeError):  # a sparse argument has no plain storage
        return any(storage_of(a) is storage for a in args if isinstance(a, torch.Tensor))
    return False
