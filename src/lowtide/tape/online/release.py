"""Which stored values go when memory is short, and the proof that each can be made again.

Price of a value, after Kirisame et al. 2021, "Dynamic Tensor Rematerialization" (https://arxiv.org/abs/2006.09616):
seconds to make it again, with all that is absent around it, by bytes and by ops since its last use. Differs: what a
layer hands on goes last, so that chains of absent values stay within layers; several values go at once, so that one
proof serves them; and nothing is dropped without a proof. Before its memory goes, a value is made again and compared
bitwise. The sum of its words is kept as a seal and compared when it goes and whenever it is made again.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch._C import _AutoDispatchBelowADInplaceOrView as below_autograd
from torch._C import _current_graph_task_id as graph_task
from torch._C import _len_torch_dispatch_stack as num_modes
from torch._C import _storage_Use_Count as use_count
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.device.dispatch import NOTHING
from lowtide.device.memory import release_cached_memory
from lowtide.device.names import is_accelerator
from lowtide.device.out_of_memory import is_out_of_memory, let_go_of_frames, tried_bytes
from lowtide.device.packing import fits_on_the_host, hold_as_one_segment, lay_together, on_the_host
from lowtide.step.storage_bits import changed_unseen, same_bytes_as_copy, same_storage_bits, sum_of_words
from lowtide.tape.online.absent_runs import AbsentRuns
from lowtide.tape.online.holdings import Holdings
from lowtide.tape.online.known_proofs import KnownProofs, is_sealed_next
from lowtide.tape.online.live_bytes import LiveBytes
from lowtide.tape.online.online_values import MARK, StoredValue
from lowtide.tape.online.replays import (
    Made,
    chain_of,
    inputs_locked,
    pinned_bytes,
    room_bytes,
    run_chain,
    transient_bytes,
    why_not_made,
)

ATTEMPTS = 4  # to run an op, or to make a value again, for which the device has no memory
_LEAST_BYTES = 4096  # smaller values are not worth a recipe
_SLACK = 0.03  # of the budget: a release makes so much more room than was asked for, so that one scan serves many ops
_PROOF_SHARE = 0.4  # of the budget at most is left free for what proofs take themselves
_OWN_REFERENCES = 2  # to a storage that only the tape holds: its tensor, and the storage's Python object
_LONGEST_CHAIN = 3000  # ops; a longer replay for one value costs more than any release is worth
_REPLAYS_PER_OP = 20  # so many replays for each op of the forward pass, and the step is thrashing
_EARLY_SHARE = 0.5  # of the budget: once so much lives, each layer is proven when it ends
_WINDOW_SHARE = 0.05  # of the budget: likewise, for what was made in the windows of a sharded model
_FAILED_SHARE = 0.1  # of the budget: at least so much is taken off where the device runs out of memory within it
_IDLE_SHARE = 0.004  # of the budget: after a vain scan, so much more must be wanted before the next


class Releaser:
    """Makes room in ``budget_bytes``.

    Attributes:
        budget_bytes: For what the step makes: resident bytes are not in it.
        aside_bytes: Left free for what nobody counts at the moment.
        dropped_bytes: Of all values that were let go of.
        over_bytes: By how much room was missing, at most.
        device: Where the step runs, if that is an accelerator.
        ran_short: The device had less memory than the budget says.
        lowered_bytes: By how much ``budget_bytes`` was lowered, since the device ran out of memory before.
        num_released, num_replayed, num_proofs: Values and runs so far.
        proven: Numbers of the ops of which another run gave the same bits.
        differed: Ops whose second run gave other bits; their outputs stay.
        busy: Replays or proofs run: the ops that the tape sees now are not the step's.
        thrashing: Replays have passed their ceiling; nothing is released any more in this step.
        must_stay: Whether a value cannot go at the moment, though it could at another.
    """

    def __init__(
        self, holdings: Holdings, live: LiveBytes, budget_bytes: float, known: KnownProofs | None = None
    ) -> None:
        self._holdings, self._live = holdings, live
        self._known = known or KnownProofs()
        self.budget_bytes = budget_bytes
        self.over_bytes = self.lowered_bytes = 0.0
        self.aside_bytes = self.dropped_bytes = 0
        self.ran_short = False
        self.device: torch.device | None = None
        self.num_released = self.num_replayed = self.num_proofs = 0
        self.proven: set[int] = set()
        self.differed: list[str] = []
        self.thrashing = False
        self.must_stay: Callable[[StoredValue], bool] | None = None
        self.proof_s = self.replay_s = 0.0
        self.num_ops = 0  # of the forward pass so far: the clock of ``last_use``, and the measure of thrashing
        self._blocked: set[int] = set()  # ids of held values that cannot go
        self._short: set[int] = set()  # those of them for whose proof there was no memory
        self._proof_bytes = 0.0  # what the proof of a held value takes, at most
        self._idle_until = 0.0
        self._proving = False
        self.busy = False
        self._still = False

    @contextmanager
    def releasing_nothing(self) -> Iterator[None]:
        """Inside, no room is made: what is made again there must stay."""
        before, self._still = self._still, True
        try:
            yield
        finally:
            self._still = before

    # -- room -----------------------------------------------------------------------------------------------

    def make_room(self, extra: int) -> None:
        """Release until ``extra`` bytes more fit, as far as that is possible."""
        if self.has_room(extra):
            return
        with _own_work():
            self._make_room(extra)

    def _make_room(self, extra: int) -> None:
        wanted = self._now + extra
        if wanted > self._idle_until and not self.thrashing and not self._still:
            self._prove_while_there_is_room(extra)
            tried: set[int] = set()
            while not self.has_room(extra):
                excess = self._now + extra - self._limit_bytes
                chosen = self._choose(excess + _SLACK * self.budget_bytes, tried)
                if not chosen:
                    self._release_what_does_not_fit(extra)
                    break
                tried.update(id(v) for v in chosen)
                self._release(chosen)
            if not self.has_room(extra):
                wanted = self._now + extra
                self._idle_until = wanted + _IDLE_SHARE * self.budget_bytes
                if wanted <= self.budget_bytes:  # only proofs do not fit
                    self._idle_until = min(self._idle_until, self.budget_bytes)
        self.over_bytes = max(self.over_bytes, self._now + extra - self.budget_bytes)

    def make_room_after_failure(self, failed_bytes: int, attempt: int = 0) -> None:
        """The device had no memory for so many bytes more, whatever the budget says: the step takes less from now on.

        An allocator holds memory in segments that are not full, which no count of what lives shows. What it holds
        unused is given back to the device, which waits. Where that did not help, what lives is laid together, so that
        memory between blocks is of use, and what there was no memory to prove may go after all.

        Args:
            attempt: How often that was done before for the same op.
        """
        with _own_work():
            self._make_room_after_failure(failed_bytes, attempt)

    def _make_room_after_failure(self, failed_bytes: int, attempt: int) -> None:
        self.ran_short = True
        before = self.budget_bytes
        present = min(before, float(self._now))
        self.budget_bytes = max(0.0, present - max(float(failed_bytes), _FAILED_SHARE * present))
        self._idle_until = 0.0
        self.make_room(0)
        if attempt and self._laid_together(tightly=attempt > 1):
            self._blocked -= self._short
            self._short.clear()
            self._idle_until = 0.0
            self.make_room(0)
        else:
            release_cached_memory()
        if self.device is not None:  # proofs that failed have given back what was held
            hold_as_one_segment(self.device, tightly=attempt > 1)
        self.budget_bytes = max(self.budget_bytes, float(self._now))  # what cannot go stays
        self.lowered_bytes += max(0.0, before - self.budget_bytes)

    def _laid_together(self, *, tightly: bool) -> bool:
        return self.device is not None and lay_together(self._live.storages(), self.device, tightly=tightly)

    @property
    def _now(self) -> int:
        return self._live.now + self.aside_bytes

    @property
    def _limit_bytes(self) -> float:
        """What may live: what is not proven yet can be proven beside it."""
        return self.budget_bytes - (0 if self._proving else min(self._proof_bytes, _PROOF_SHARE * self.budget_bytes))

    def has_room(self, extra: float) -> bool:
        """Whether ``extra`` bytes more fit, beside proofs that are still to come."""
        return self._now + extra <= self._limit_bytes

    def reserve_for(self, value: StoredValue) -> None:
        """``value`` is held from now on: its proof will take room."""
        if self._may_be_proven(value) and not self._is_proven(value):
            self._proof_bytes = max(self._proof_bytes, _room_for_proof(value))

    def _prove_while_there_is_room(self, extra: int) -> None:
        """Prove what takes most for it, until ``extra`` bytes fit beside the other proofs: nothing is let go for it."""
        if not self._proof_bytes:  # nothing that is held has to be proven
            return
        rooms = [(room, v) for v in self._unproven() if (room := _room_for_proof(v)) < math.inf]
        rooms.sort(key=lambda found: (found[0], found[1].number))
        while rooms and not self._proving:
            self._proof_bytes = rooms[-1][0]
            if self.has_room(extra) or self._now + self._proof_bytes > self.budget_bytes:
                return
            self._prove([rooms.pop()[1]])
        self._proof_bytes = 0.0

    def _unproven(self, values: Iterable[StoredValue] | None = None) -> list[StoredValue]:
        """Those of ``values``, or of all that is held, that are to be proven."""
        values = self._holdings if values is None else values
        return [v for v in values if self._may_be_proven(v) and not self._is_proven(v)]

    def _is_proven(self, value: StoredValue) -> bool:
        return value.proven or value.known_with_inputs or self._known.knows(value)

    def _choose(self, excess: float, tried: set[int]) -> list[StoredValue]:
        candidates = [v for v in self._holdings if id(v) not in tried and self._may_go(v)]
        absent = AbsentRuns()
        candidates.sort(key=lambda value: self._price(value, absent))
        chosen, size = [], 0
        for value in candidates:
            if size >= excess:
                break
            chosen.append(value)
            size += value.bytes
        return chosen

    def _may_be_proven(self, value: StoredValue) -> bool:
        if value.bytes < _LEAST_BYTES or value.recipe is None or value.why_kept or id(value) in self._blocked:
            return False
        if value.crosses or (value.recipe.gathered and not value.proven and value.recipe.is_closed):
            return False
        return value.tensor is not None and value.tensor._version == value.version

    def _may_go(self, value: StoredValue) -> bool:
        if value.locked or not self._may_be_proven(value):
            return False
        assert value.tensor is not None
        return use_count(value.tensor.untyped_storage()._cdata) <= _OWN_REFERENCES

    def _price(self, value: StoredValue, absent: AbsentRuns) -> tuple[bool, float]:
        age = self.num_ops - value.last_use + 1
        return value.leaves_layer, absent.seconds_to_make(value) / (value.bytes * max(age, 1))

    # -- release --------------------------------------------------------------------------------------------

    def _release(self, chosen: list[StoredValue]) -> None:
        unproven = [v for v in chosen if not self._is_proven(v)]
        if self._fits(unproven):
            self._prove(unproven)
            for value in sorted(chosen, key=lambda v: v.number):
                self._drop(value)
            return
        # Not all at once: each goes as soon as it is proven, those that take least for it first.
        for value in sorted(chosen, key=_room_for_proof):
            if self._is_proven(value) or self._fits([value]):
                self._prove([value])
                self._drop(value)

    def _release_what_does_not_fit(self, extra: int) -> None:
        """The last resort: proofs that take more than there is, for a moment.

        In forward, where more is to come: until proofs are out of the way. In backward no more than is missing anyway,
        unless the device has run out: then it says itself what is too much.
        """
        in_backward = graph_task() != -1
        limit = self.budget_bytes if in_backward else self._limit_bytes
        for value in sorted((v for v in self._holdings if self._may_go(v)), key=_room_for_proof):
            missing = self._now + extra - limit
            over = self._now + _room_for_proof(value) - self.budget_bytes
            too_much = in_backward and not self.ran_short and over > max(missing, self.over_bytes)
            if missing <= 0 or too_much:
                break
            self._prove([value])
            self._drop(value)

    def _fits(self, values: list[StoredValue]) -> bool:
        """Whether ``values`` can be proven in one pass within the budget."""
        chain = chain_of(values) if values else []
        return chain is not None and transient_bytes(chain, values) + self._now <= self.budget_bytes

    def _drop(self, value: StoredValue) -> None:
        if not self._is_proven(value) or value.tensor is None or value.locked:
            return
        chain = chain_of([value], later=True)
        if chain is None or len(chain) > _LONGEST_CHAIN or pinned_bytes(chain) >= value.bytes:
            self._blocked.add(id(value))
            return
        if self.must_stay is not None and self.must_stay(value):
            return
        if not value.proven:
            value.seal = sum_of_words(value.tensor) if is_sealed_next() else None
        elif value.seal != sum_of_words(value.tensor):  # written since the proof, by what no version counts
            value.why_kept = "was changed unseen"
            return
        self._holdings.release(value)
        self.num_released += 1
        self.dropped_bytes += value.bytes

    def prove_layer(self, layer: int) -> None:
        """Prove what a layer has made while all of it is there: later a proof takes more memory, or there is none.

        Layer 0 is what runs in none.
        """
        if self._now <= _EARLY_SHARE * self.budget_bytes or self.thrashing:
            return
        self._prove_what_fits(self._unproven([v for v in self._holdings if v.layer == layer and not v.proven]))

    def prove_rest(self) -> None:
        """Prove all that is held, if a plan will have to drop some of it: what it need not run twice takes no room."""
        if self._now > _EARLY_SHARE * self.budget_bytes and not self.thrashing:
            for value in self._unproven():
                if not self._is_proven(value):  # another one's proof may have been its own
                    self._prove_what_fits([value])

    def prove_window(self, outer: frozenset[int]) -> None:
        """Prove what was made in windows that are about to close, though little lives yet: later it cannot be proven.

        Args:
            outer: The windows that stay open.
        """
        if self._now > _WINDOW_SHARE * self.budget_bytes and not self.thrashing:
            inside = [v for v in self._holdings if not v.windows <= outer]
            self._prove_what_fits(self._unproven(inside))
            if graph_task() == -1:
                self._release_now_or_never(inside)

    def _release_now_or_never(self, values: list[StoredValue]) -> None:
        """Of ``values``, those made from what was made outside their window and is held by nobody.

        When that is gone they have to stay. Once it is held for one of them, it is there for the others.
        """
        absent = AbsentRuns()
        with _own_work():
            for value in sorted(values, key=lambda v: self._price(v, absent)):
                if not self._may_go(value):
                    continue
                chain = chain_of([value], later=True) or []
                roots = [read for v in chain for read in v.inputs if read.is_root_for(v)]
                if not all(root.is_present for root in roots) and pinned_bytes(chain) < value.bytes:
                    self._drop(value)

    def _prove_what_fits(self, values: list[StoredValue]) -> None:
        values = [v for v in values if chain_of([v]) is not None]
        with _own_work():
            for part in [values] if self._fits(values) else [[v] for v in values]:
                if self._fits(part):
                    self._prove(part)

    def _prove(self, values: list[StoredValue], copy: torch.UntypedStorage | None = None) -> None:
        """Make each again beside what it replaces and compare; those that differ stay for good.

        Args:
            copy: What the first of ``values`` holds, if that is in host memory meanwhile.
        """
        away = values[0] if copy is not None else None
        values = self._unproven(_with_siblings(values))
        chain = chain_of(values) if values else None
        if chain is None:
            self._blocked.update(id(v) for v in values if chain_of([v], later=True) is None)
            return
        targets = {id(v) for v in values}
        num_differed, start = len(self.differed), time.perf_counter()

        def take(_: StoredValue, made: Made) -> Made:
            later: Made = []
            for value, tensor in made:
                self._live.add(tensor.untyped_storage())
                if id(value) not in targets:
                    if not value.is_present:
                        later.append((value, tensor))
                    continue
                self.num_proofs += 1
                assert value.recipe is not None
                if self._has_same_bits(value, tensor, copy if value is away else None):
                    value.proven, value.seal = True, sum_of_words(tensor)
                    self.proven.add(value.number)
                else:
                    value.why_kept = "another run gives other bits"
                    self.differed.append(value.recipe.name)
            return later

        before, self._proving = self._proving, True
        try:
            self._run(chain, values, take)
            if len(self.differed) == num_differed:
                self._known.learn(chain)
                self.proven.update(v.number for v in chain)  # what they were made from has run twice, too
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            short = [v for v in values if not v.proven]  # there is no memory to prove them
            let_go_of_frames(error)
            release_cached_memory()
            if copy is None:
                for value in short:
                    self._prove_in_its_place(value)
                short = [v for v in short if not v.proven]
            self._short.update(map(id, short))
            self._blocked.update(map(id, short))
        finally:
            self._proving = before
        self.proof_s += time.perf_counter() - start

    @staticmethod
    def _has_same_bits(value: StoredValue, made: torch.Tensor, copy: torch.UntypedStorage | None) -> bool:
        assert value.tensor is not None
        return same_storage_bits(made, value.tensor) if copy is None else same_bytes_as_copy(made, copy)

    def _prove_in_its_place(self, value: StoredValue) -> None:
        """Make ``value`` again where it lay: what it holds goes to host memory, and comes back."""
        if not self._may_go(value) or value.proven or value.tensor is None or not is_accelerator(value.tensor.device):
            return
        storage = value.tensor.untyped_storage()
        size = storage.nbytes()
        if not storage.resizable() or not fits_on_the_host(size):
            return
        with on_the_host(storage) as copy:
            self._live.forget(storage)
            self._prove([value], copy)
        self._live.add(storage, size)

    # -- remake ---------------------------------------------------------------------------------------------

    def remake(self, target: StoredValue) -> None:
        """Make a released value again.

        Raises:
            ReplayError: what it is made from was changed since; the seal shows changes that no version shows.
        """
        with _own_work():
            self._remake(target)

    def _remake(self, target: StoredValue) -> None:
        start = time.perf_counter()
        target.run.catch_up()
        chain = chain_of([target])
        if chain is None:
            raise why_not_made(target)
        with inputs_locked(chain):  # while it runs, hardly anything may go
            self.make_room(transient_bytes(chain, ()))

        def take(value: StoredValue, made: Made) -> Made:
            later: Made = []
            for other, tensor in made:
                if other.is_present:
                    continue
                if other.seal is not None and other.seal != sum_of_words(tensor):
                    raise changed_unseen(other.recipe.name if other.recipe else "an op", "")
                storage = tensor.untyped_storage()
                self._live.add(storage)
                if other.is_needed and not other.overwritten and self.stays(other, target):
                    storage.__dict__[MARK] = other
                    other.note_remade(tensor)
                    other.last_use = self.num_ops
                    self._holdings.restore(other, tensor)
                else:
                    later.append((other, tensor))
            return later

        for attempt in range(ATTEMPTS):
            try:
                self._run(chain, (), take)
                break
            except Exception as error:
                if attempt + 1 == ATTEMPTS or not is_out_of_memory(error):
                    raise
                needed = max(tried_bytes(error), transient_bytes(chain, ()))
                let_go_of_frames(error)
            with inputs_locked(chain):
                self.make_room_after_failure(needed << attempt, attempt)
            again = chain_of([target])
            if again is None:
                raise why_not_made(target)
            chain = again
        self.num_replayed += len(chain)
        if self.num_replayed > _REPLAYS_PER_OP * max(self.num_ops, 1):
            self.thrashing = True
        self.replay_s += time.perf_counter() - start

    def stays(self, value: StoredValue, target: StoredValue) -> bool:
        """Whether ``value``, which is needed and made on the way to ``target``, is held from then on."""
        return True

    def _run(
        self, chain: list[StoredValue], targets: Sequence[StoredValue], take: Callable[[StoredValue, Made], Made]
    ) -> None:
        before, self.busy = self.busy, True
        try:
            run_chain(chain, targets, self._before_replay, take)
        finally:
            self.busy = before

    def _before_replay(self, value: StoredValue) -> None:
        if not self._proving:
            self.make_room(room_bytes(value))


@contextmanager
def _own_work() -> Iterator[None]:
    """Inside, what runs is no op of any step: autograd and modes, those of other models too, do not see it."""
    with torch.no_grad(), _disable_current_modes() if num_modes() else NOTHING, below_autograd():
        yield


def _with_siblings(values: Iterable[StoredValue]) -> list[StoredValue]:
    """``values`` and what else their ops have made: one run proves all of an op's outputs."""
    found = {id(v): v for v in values}
    for value in list(found.values()):
        if value.recipe is not None:
            found |= {id(o): o for _, reference in value.recipe.outputs if (o := reference()) is not None}
    return list(found.values())


def _room_for_proof(value: StoredValue) -> float:
    chain = chain_of([value])
    return math.inf if chain is None else transient_bytes(chain, [value])
