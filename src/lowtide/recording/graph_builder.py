"""A StepGraph while it is being recorded, from any source of ops.

Plain data. ``Recorder`` fills it from a real step; any other source of ops can do the same.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from lowtide.graph.function_ops import ELSEWHERE
from lowtide.graph.step_graph import DROP, FREE, NEW_GRADIENT, PACK, RELEASE, RUN, UNPACK, Frame, Op, StepGraph, Storage


class Mark(NamedTuple):
    """How many there are of each."""

    ops: int
    events: int
    storages: int
    saved: int
    fixed: int


class GraphBuilder:
    """Storages, ops, saved tensors, events and module calls in the order in which they are added."""

    def __init__(self, *, region: str) -> None:
        self.region = region  # as in ``StepGraph``
        self.storages: list[Storage] = []
        self.ops: list[Op] = []
        self.saved: list[int] = []
        self.events: list[tuple[int, int]] = []
        self.frames: list[Frame] = [Frame(-1, "", 0)]
        self.signatures: list[dict[str, Any]] = []
        self.recorded_ms: dict[int, float] = {}
        self.calls: list[str] = []
        self.retained_backwards: list[tuple[int, int]] = []
        self._first_of_backward = 0
        self.recording = True  # what happens now is part of the step; if not, events are left out
        self.ops_ignored = False  # if set, ops are left out; events still count
        self._stack = [0]
        self._calls_of: dict[tuple[int, str], int] = {}  # (parent frame, path) -> calls so far
        self._readers: dict[int, list[int]] = {}  # storage -> forward ops that read it
        self._unread: set[int] = set()  # storages made and not read yet: an in-place op may still complete them
        self._written_in_backward: list[tuple[int, int]] = []  # storage, number of events before
        self._fixed: list[int] = []  # storages that ``fix`` found free, in order

    def paused(self) -> AbstractContextManager[None]:
        """What runs inside is not part of the step."""
        return self._with("recording", value=False)

    def resumed(self) -> AbstractContextManager[None]:
        """What runs inside is part of the step, though ``paused`` surrounds it."""
        return self._with("recording", value=True)

    def ignoring_ops(self) -> AbstractContextManager[None]:
        """Ops that run inside are not part of the step, what they free is."""
        return self._with("ops_ignored", value=True)

    @contextmanager
    def _with(self, flag: str, *, value: bool) -> Iterator[None]:
        before = getattr(self, flag)
        setattr(self, flag, value)
        try:
            yield
        finally:
            setattr(self, flag, before)

    def add_event(self, kind: int, number: int) -> None:
        if self.recording:
            self.events.append((kind, number))

    def enter(self, path: str) -> None:
        parent = self._stack[-1]
        ordinal = self._calls_of.get((parent, path), 0)
        self._calls_of[parent, path] = ordinal + 1
        self.frames.append(Frame(parent, path, ordinal))
        self._stack.append(len(self.frames) - 1)

    def leave(self) -> None:
        self._stack.pop()

    @property
    def frame(self) -> int:
        """The module call that runs now."""
        return self._stack[-1]

    @property
    def path(self) -> str:
        """Its path as errors name it."""
        return self.frames[self._stack[-1]].path or "(the step)"

    def add_storage(self, size: int, kind: str, *, op: int | None = None, output: int = 0, fixed: str = "") -> int:
        """The id of a new storage of ``size`` bytes; made by ``op``, or there before the step."""
        number = len(self.storages)
        self.storages.append(Storage(number, size, kind, op, output, fixed))
        return number

    def add_unseen_storage(self, size: int) -> int:
        """One that a node of backward made while nobody looked on: it counts as made by the op before.

        So does half as much again beside it: the gradient of ``prod`` is a product with a quotient, and has asked
        before where there are zeros.
        """
        last = self.ops[-1]
        number = self.add_storage(size, "activation", op=last.id, output=len(last.makes), fixed="was made unseen")
        workspace_bytes = max(last.workspace_bytes, size + size // 2)
        self.ops[-1] = replace(last, makes=(*last.makes, number), workspace_bytes=workspace_bytes)
        return number

    def fix(self, storage: int, reason: str) -> None:
        """The storage must be saved; of several reasons the first counts."""
        if not self.storages[storage].fixed:
            self.storages[storage] = replace(self.storages[storage], fixed=reason)
            self._fixed.append(storage)

    def changes_during_step(self, storage: int) -> bool:
        """It was there before the step, and something in the step writes it."""
        return self.storages[storage].op is None and bool(self.storages[storage].fixed)

    def mark_written(self, storage: int) -> None:
        """Memory that changes cannot be recomputed, nor can what was computed from it before the change."""
        if self.storages[storage].kind == "gradient":
            return
        self.fix(storage, "written during the step")
        for earlier in self._readers.pop(storage, ()):
            if earlier < len(self.ops):
                completed = self.ops[earlier].completes_inplace
                for made in self.ops[earlier if completed is None else completed].makes:
                    self.fix(made, "was computed from memory that is written later in the step")

    def mark_written_in_backward(self, storage: int) -> None:
        """Backward has written over what it was given of ``storage``, and nothing shows that but the memory.

        Whether anything could see it is known when the step is over.
        """
        self._written_in_backward.append((storage, len(self.events)))

    def _is_seen_after(self, storage: int, at: int) -> bool:
        """Whether memory that was written at that event is read later: itself, or by a replay for what is unpacked.

        What ops of backward read then is what was written: its gradients may lie in the memory that it was given.
        """
        if self.storages[storage].op is None or (FREE, storage) not in self.events[:at]:
            return True
        reach = {storage}
        for op in self.ops:
            if not op.backward and not reach.isdisjoint(op.reads):
                reach.update(op.makes)
        after = self.events[at:]
        again = any(kind == UNPACK and self.saved[number] in reach for kind, number in after)
        ops = [self.ops[number] for kind, number in after if kind == RUN]
        return again or any(not op.backward and storage in op.reads for op in ops)

    def begin_backward(self) -> None:
        """Ops from here on are of a backward pass."""
        self._first_of_backward = len(self.ops)

    def end_retained_backward(self) -> None:
        """That backward pass is over, and has left its graph for another one."""
        if self.recording and len(self.ops) > self._first_of_backward:
            self.retained_backwards.append((self._first_of_backward, len(self.ops) - 1))

    def add_signature(self, signature: dict[str, Any], *, recorded_ms: float | None = None) -> int:
        """The number of a new signature; ``recorded_ms`` of one that cannot be run again for timing."""
        self.signatures.append(signature)
        if recorded_ms is not None:
            self.recorded_ms[len(self.signatures) - 1] = recorded_ms
        return len(self.signatures) - 1

    def begin_op(self) -> int:
        """The id of the op that runs now; append the op to ``ops`` when it has run."""
        self.add_event(RUN, len(self.ops))
        return len(self.ops)

    def add_reads(self, op: int, reads: tuple[int, ...], writes: tuple[int, ...] = ()) -> None:
        """A forward op reads these."""
        self._unread.difference_update(s for s in reads if s not in writes)
        for s in reads:
            self._readers.setdefault(s, []).append(op)

    def was_read(self, storage: int) -> bool:
        """A forward op has read it since it was last written, or autograd stores it."""
        return storage in self.saved or bool(self._readers.get(storage))

    def add_saved(self, storage: int) -> int:
        """The id of a new saved tensor: autograd stores ``storage``."""
        self.saved.append(storage)
        self.add_event(PACK, len(self.saved) - 1)
        self._unread.discard(storage)
        return len(self.saved) - 1

    def allow_completion(self, storages: list[int]) -> None:
        """In-place ops may complete these as long as nothing reads them."""
        self._unread.update(storages)

    def end_completion(self, storage: int) -> None:
        self._unread.discard(storage)

    def maker_to_complete(self, storage: int, others: tuple[int, ...]) -> int | None:
        """The op whose output an in-place op on ``storage`` that also reads ``others`` may complete.

        Only what could have been read when the output was made may go into it, so that replays stay in order.
        """
        maker = self.storages[storage].op
        if storage not in self._unread or maker is None:
            return None
        too_late = any((self.storages[s].op or 0) > maker or self.changes_during_step(s) for s in others)
        return None if too_late else maker

    def complete_inplace(self, maker: int, others: tuple[int, ...], rng_bytes: int) -> None:
        """Count what the completing op reads and draws with ``maker``; the two are replayed as one."""
        op = self.ops[maker]
        reads = tuple(dict.fromkeys((*op.reads, *others)))
        self.ops[maker] = replace(op, reads=reads, rng_bytes=op.rng_bytes + rng_bytes)

    def mark(self) -> "Mark":
        """Where the record stands now."""
        return Mark(len(self.ops), len(self.events), len(self.storages), len(self.saved), len(self._fixed))

    def cut(self, mark: "Mark") -> None:
        """The step ended at ``mark``: what was recorded later is no part of it, such as what an optimizer wrote."""
        for storage in self._fixed[mark.fixed :]:
            self.unfix(storage)
        del self._fixed[mark.fixed :]
        self._written_in_backward = [(s, at) for s, at in self._written_in_backward if at <= mark.events]
        del self.ops[mark.ops :], self.events[mark.events :], self.storages[mark.storages :], self.saved[mark.saved :]
        self._forget_backwards(mark.ops)

    def _forget_backwards(self, first_op: int) -> None:
        """Those that ran from there on."""
        self.retained_backwards = [span for span in self.retained_backwards if span[1] < first_op]

    def made_since(self, mark: "Mark") -> list[int]:
        """Storages made since then that live."""
        freed = {number for kind, number in self.events[mark.events :] if kind == FREE}
        return [s for s in range(mark.storages, len(self.storages)) if s not in freed]

    def let_go_since(self, event: int) -> set[int]:
        """The storages made in the step whose last hold, Python's or autograd's, has ended at ``event`` or later."""
        found = {s for e in self.events[event:] if (s := self.let_go_by(e)) is not None}
        holds = Counter(s for s in found if self.storages[s].op is not None)
        for kind, number in self.events:
            let_go = self.let_go_by((kind, number))
            if let_go is not None:
                holds[let_go] -= 1
            elif kind in (PACK, UNPACK):
                holds[self.saved[number]] += 1
        return {s for s in found if self.storages[s].op is not None and holds[s] == 0}

    def let_go_by(self, event: tuple[int, int]) -> int | None:
        """The storage of which ``event`` ends a hold."""
        kind, number = event
        if kind == FREE:
            return number
        return self.saved[number] if kind in (DROP, RELEASE) else None

    def join_ops(self, mark: "Mark", op: Op, outputs: list[int]) -> None:
        """``op`` in place of all ops since ``mark``; it makes those of their storages that live.

        What died meanwhile becomes its workspace.

        Args:
            op: ``workspace_bytes`` are all that it allocates at once, where no operator shows that, else 0.
            outputs: The storages of what it returns, by number of the output. What lives besides is saved.
        """
        makes = self.made_since(mark)
        live = peak = 0
        for kind, number in self.events[mark.events :]:
            if kind == RUN and number < len(self.ops):
                live += sum(self.storages[s].bytes for s in self.ops[number].makes)
                peak = max(peak, live + self.ops[number].workspace_bytes)
            elif kind == FREE and number >= mark.storages:
                live -= self.storages[number].bytes
        made_bytes = sum(self.storages[s].bytes for s in makes)
        for s in range(mark.storages, len(self.storages)):
            if s in makes:
                fixed = self.storages[s].fixed if s in outputs else self.storages[s].fixed or ELSEWHERE
                output = outputs.index(s) if s in outputs else len(outputs)
                self.storages[s] = Storage(s, self.storages[s].bytes, "activation", op.id, output, fixed)
            else:  # nothing sees it any more
                self.storages[s] = Storage(s, 0, "other")
            self._unread.discard(s)
        for s in {s for joined in self.ops[mark.ops :] for s in joined.reads}:
            if readers := self._readers.get(s):
                readers[:] = [number for number in readers if number < op.id]
        del self.ops[mark.ops :]
        self._forget_backwards(mark.ops)
        gone = {(FREE, s) for s in range(mark.storages, len(self.storages))}
        since = [e for e in self.events[mark.events :] if e[0] != RUN and e not in gone]
        self.events[mark.events :] = [(RUN, op.id), *since]
        self.ops.append(
            replace(op, makes=tuple(makes), workspace_bytes=max(peak - made_bytes, op.workspace_bytes - made_bytes, 0))
        )
        self.add_reads(op.id, op.reads, op.writes)

    def note_gradient(self, storage: int) -> bool:
        """A parameter's gradient is in ``storage`` as backward ends. Returns whether the step's backward made it."""
        made = self.storages[storage].op
        if made is None or made >= len(self.ops) or not self.ops[made].backward:
            return False
        self.storages[storage] = replace(self.storages[storage], kind=NEW_GRADIENT)
        return True

    def settle_gradients(self) -> set[int]:
        """The step is over: those that backward made and that were there when its last op had run."""
        new = {s.id for s in self.storages if s.kind == NEW_GRADIENT}
        last_run = max((at for at, (kind, _) in enumerate(self.events) if kind == RUN), default=-1)
        gone = {number for kind, number in self.events[:last_run] if kind == FREE} & new
        for number in gone:
            self.storages[number] = replace(self.storages[number], kind="backward")
        new -= gone
        after = [event for event in self.events[last_run + 1 :] if event[0] != FREE or event[1] not in new]
        self.events[last_run + 1 :] = after  # ``zero_grad`` comes after the step
        return new

    def unfix(self, storage: int) -> None:
        """Nothing has to save the storage any more."""
        self.storages[storage] = replace(self.storages[storage], fixed="")

    def count_elsewhere(self, storage: int) -> int:
        """If the step made it, it counts as there before, as in later steps: the bytes that are taken off here."""
        made = self.storages[storage]
        if made.op is None:
            return 0
        self.storages[storage] = replace(made, bytes=0)
        return made.bytes

    def build(self, **fields: Any) -> StepGraph:
        """What was recorded; ``fields`` are those of ``StepGraph`` that follow from no op."""
        for storage, at in self._written_in_backward:
            if self._is_seen_after(storage, at):
                self.mark_written(storage)
        return StepGraph(
            **fields,
            signatures=tuple(self.signatures),
            frames=tuple(self.frames),
            storages=tuple(self.storages),
            ops=tuple(self.ops),
            saved=tuple(self.saved),
            events=tuple(self.events),
            calls=tuple(self.calls),
            region=self.region,
            retained_backwards=tuple(self.retained_backwards),
            recorded_ms=dict(self.recorded_ms),
        )
