"""Stored values: what the online tape knows of a storage between two writes, and how it is made again.

    StoredValue   one storage at one version. Recipes name stored values, never tensors, so that a recipe pins nothing.
    Recipe        the op that made one, and the in-place ops that completed it, ready to run again.
    Claim         autograd's interest in a stored value; every ``SavedHandle`` of it shares one. It dies with the last.
    SavedHandle   what autograd holds in place of one tensor.
    Argument      a stored value as an argument of an op, with the view that the op read.

A stored value's ``tensor`` is set while the memory is needed: autograd (a claim lives), or a released value whose
recipe reads it (``readers_released``). So a recipe can pin memory only from a release on, where the two are compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lowtide.device.dispatch import bytes_of, hidden_from_modes
from lowtide.device.generators import GeneratorStates
from lowtide.errors import ReplayError
from lowtide.step import optimizer_steps
from lowtide.step.execution_state import ExecutionState, GeneratorState
from lowtide.step.operators import allocated_bytes, omitted_in_replay, storage_of, tensors_in
from lowtide.step.sharding.windows import NO_WINDOWS
from lowtide.tape.completions import Completion, OwnOutput
from lowtide.tape.online.room import ExpectedBytes, Key, key_of
from lowtide.tape.values import GatheredView, Kept, ViewSpec, gathered_view, sharing_version

_WRITTEN = -1  # no tensor has this version
MARK = "_lowtide_stored_value"  # attribute of the storage's Python object


class StoredValue:
    """One storage between two writes.

    Attributes:
        number: The op that made it, or completed it in place: values are made again in this order.
        version: That tensors over the storage have as long as this is their value.
        tensor: Set while autograd or a released value needs the memory; None otherwise, and when it is released.
        recipe: How to make it again; None if that cannot be done.
        why_kept: Why it cannot be released ("" if it can).
        readers_released: Released values whose recipes read this one, each as often as it does.
        num_reads: How often ops of the forward pass have read it or autograd has saved it.
        layer: The layer's call in which it was made; ``leaves_layer``: something outside has read it.
        windows: Those of a sharded model that were open when it was made; ``crosses``: something outside one of them
            has read it, and may ask for it when parameters that it is made from are not gathered.
        last_use: The last op that touched it.
        proven: It was made again, with the same bits; ``known``: its op need not be; None: nobody has asked.
            ``known_with_inputs``: Nor need be any of those before it.
        cost_s: Seconds that its op took when it ran.
        run: The step that it belongs to.
        seal: Sum of its words at release, compared when it is made again.
        locked: A running replay reads it.
        overwritten: The memory holds something else now. Whoever saved it gets what plain autograd gives; a recipe that
            reads it needs it made again.
    """

    # One is made for each op: what most never change stands here.
    tensor: Tensor | None = None
    recipe: Recipe | None = None
    why_kept = ""
    claim: Callable[[], Claim | None] = staticmethod(lambda: None)
    readers_released = num_reads = locked = 0
    leaves_layer = crosses = proven = remade = overwritten = False
    known: bool | None = None
    known_with_inputs = False
    windows = NO_WINDOWS
    cost_s = 0.0
    seal: int | None = None

    def __init__(
        self,
        storage: torch.UntypedStorage,
        number: int,
        version: int,
        layer: int,
        run: ExecutionState,
        size: int | None = None,
    ) -> None:
        self.storage: Callable[[], torch.UntypedStorage | None] = weakref.ref(storage)
        self.bytes = allocated_bytes(storage) if size is None else size
        self.run, self.version, self.layer = run, version, layer
        self.number = self.last_use = number
        if run.windows is not None:
            self.windows = run.windows.around

    @property
    def is_needed(self) -> bool:
        return self.readers_released > 0 or self.claim() is not None

    @property
    def inputs(self) -> tuple[StoredValue, ...]:
        return () if self.recipe is None else self.recipe.inputs

    @property
    def is_present(self) -> bool:
        """The tape holds its memory, and that still holds this value."""
        return self.tensor is not None and not self.overwritten

    def is_root_for(self, reader: StoredValue) -> bool:
        """Whether ``reader`` can only be made from its memory: it cannot be made again, or not where ``reader`` can."""
        return self.recipe is None or not self.windows <= reader.windows

    def memory(self) -> Tensor | None:
        """A tensor over its memory where that still holds this value; None where it does not."""
        if self.is_present:
            return self.tensor
        storage = self.storage()
        if storage is None or storage.__dict__.get(MARK) is not self:
            return None
        with hidden_from_modes():  # a mode that is in place would take this for a write of the step's
            return bytes_of(storage)

    def note_remade(self, tensor: Tensor) -> None:
        """``tensor`` is over its memory from now on: only the tape and autograd have ever seen it."""
        self.storage, self.version, self.remade = weakref.ref(tensor.untyped_storage()), tensor._version, True

    def move_to(self, copy: Tensor) -> None:
        """Its own memory is about to be written: recipes read ``copy``, autograd's handles note the write."""
        self.tensor, self.storage, self.version = copy, weakref.ref(copy.untyped_storage()), _WRITTEN
        copy.untyped_storage().__dict__[MARK] = self


class Claim:
    """Autograd's interest in a stored value; ``number``: in the order of the step's claims, from 1 on."""

    __slots__ = ("__weakref__", "number", "on_end", "value")

    def __init__(self, value: StoredValue, on_end: Callable[[StoredValue], None], number: int = 0) -> None:
        self.value, self.on_end, self.number = value, on_end, number

    def __del__(self) -> None:
        self.on_end(self.value)


class SavedHandle(ViewSpec):
    """What autograd holds in place of one tensor: how to make that of the value."""

    __slots__ = ("claim", "version")

    def __init__(self, claim: Claim, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.claim, self.version = claim, tensor._version


class Argument(ViewSpec):
    """A stored value as an argument of an op: how the op read it."""

    __slots__ = ("value",)

    def __init__(self, value: StoredValue, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.value = value


def value_of_storage(storage: torch.UntypedStorage | None, run: ExecutionState) -> StoredValue | None:
    """The stored value of ``storage``; None if no op under the tape made it."""
    value: StoredValue | None = None if storage is None else storage.__dict__.get(MARK)
    return value if value is not None and value.run is run else None


class UnreadableError(Exception):
    """An argument cannot be named by a recipe; the text says why."""


Transient = Mapping[StoredValue, Tensor]  # made for a replay that runs, and dropped after its last reader


_NOT_LOOKED_UP: Mapping[int, StoredValue | None] = MappingProxyType({})
_UNKNOWN: Any = object()
_NO_KWARGS: dict[str, Any] = {}
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype})


class Recipe:
    """One op of the forward pass, ready to run again.

    Attributes:
        inputs: The stored values that it reads, each as often as it does.
        outputs: ``(position, value)`` of what it made.
        room_bytes: For all of that, and workspace; worked out when somebody asks.
        place: The module call that it ran in, and its position there; None of what is proven each time.
        outside: Tensors that no op under the tape made (parameters, the batch).
        gathered: Parameters that it reads and that are whole only in its windows.
    """

    inputs: tuple[StoredValue, ...] = ()
    outside: tuple[Kept, ...] = ()
    gathered: tuple[Kept | GatheredView, ...] = ()
    outputs: tuple[tuple[int, weakref.ref[StoredValue]], ...] = ()
    _completions: tuple[Completion, ...] = ()
    place: tuple[str, int] | None = None
    _written = False
    _expected: ExpectedBytes | None = None
    _room_bytes = 0
    _key: Key | None = None

    def __init__(
        self,
        func: Any,
        args: tuple,
        kwargs: dict,
        rng: GeneratorState | GeneratorStates | None,
        run: ExecutionState,
        read: Mapping[int, StoredValue | None] = _NOT_LOOKED_UP,
    ) -> None:
        """``read``: by id, the stored values of the tensors among the arguments, where they have been looked up.

        Raises:
            UnreadableError: an argument cannot be named.
        """
        self._func, self._rng, self._run = func, rng, run
        skipped = omitted_in_replay(func, args)
        self._args = [None if i in skipped else self._stored(a, read) for i, a in enumerate(args)] if skipped else [
            a if type(a) in _PLAIN else self._stored(a, read) for a in args
        ]  # fmt: skip
        self._kwargs = {name: self._stored(a, read) for name, a in kwargs.items()} if kwargs else _NO_KWARGS

    @property
    def name(self) -> str:
        return str(self._func)

    @property
    def flags(self) -> Any:
        """The global ones that it runs under."""
        return self._run.flags

    @property
    def autocast(self) -> Any:
        """As its kernel, which may run other operators, finds it; () where that is off, or asks for none."""
        return getattr(self._rng, "key", ())

    def calls(self) -> Iterator[tuple[Any, list[Any], Mapping[str, Any]]]:
        """Operator, named arguments and keywords: of the op, then of what completed it."""
        yield self._func, self._args, self._kwargs
        for completion in self._completions:
            yield completion.func, completion.args, completion.kwargs

    def complete(self, func: Any, args: tuple, kwargs: dict, rng: GeneratorState | None, position: int) -> None:
        """Add an in-place op on the output at ``position``. Raises: UnreadableError: an argument cannot be named."""
        own = storage_of(args[0])
        stored = [
            OwnOutput(a, position) if isinstance(a, Tensor) and storage_of(a) is own else self._stored(a) for a in args
        ]
        named = {name: self._stored(a) for name, a in kwargs.items()}
        self._completions += (Completion(func, stored, named, rng),)

    def take_outputs(
        self,
        made: Sequence[tuple[int, StoredValue]],
        room_bytes: int = 0,
        expected: ExpectedBytes | None = None,
        key: Key | None = None,
    ) -> None:
        """It makes these, by position in what it returns, and takes ``room_bytes``, workspace included.

        Args:
            expected: Knows ``room_bytes`` by ``key``, and is asked when a replay comes: a workspace is known once the
                op has run.
        """
        self.outputs = tuple((position, weakref.ref(value)) for position, value in made)
        self._room_bytes = max(room_bytes, sum(value.bytes for _, value in made))
        self._expected, self._key = expected, key

    @property
    def room_bytes(self) -> int:
        expected = self._expected
        if expected is None:
            return self._room_bytes
        if self._key is None:
            self._key = self.key()
            expected.learn(self._key, self._room_bytes)
        return expected.of(self._key, self._func, (), _NO_KWARGS)

    def key(self) -> Key:
        """Of its op, as ``ExpectedBytes.key`` has it."""
        tensors: list[tuple[Any, torch.dtype]] = []
        todo = list(reversed(self._args))
        while todo:
            name = todo.pop()
            kind = type(name)
            if kind is Argument or kind is GatheredView:
                tensors.append((name.size, name.dtype))
            elif kind is Kept:
                tensors.append((name.tensor.shape, name.tensor.dtype))
            elif kind is list:
                todo += reversed(name)
        return key_of(self._func, self._run.stream is None, tensors, self._args)

    def reads_outside(self, storage: torch.UntypedStorage) -> bool:
        return any(kept.tensor.untyped_storage()._cdata == storage._cdata for kept in self.outside)

    @property
    def is_stale(self) -> bool:
        """What it read from outside has been written since. A parameter that is freed will be gathered again."""
        if self._written or any(map(self._is_unreadable, self.outside)):
            return True
        return any(self._why_not_gathered(read) == "changed" for read in self.gathered)

    @property
    def is_closed(self) -> bool:
        """A parameter that it reads is not gathered now."""
        return any(self._why_not_gathered(read) for read in self.gathered)

    def why_stale(self) -> ReplayError | None:
        """The error for what it read from outside and cannot read any more; None if it still can."""
        for kept in self.outside:
            if self._written or self._is_unreadable(kept):
                return self._cannot_read(kept)
        for read in self.gathered:
            if why := self._why_not_gathered(read):
                return self._cannot_read(read, why)
        return None

    def _why_not_gathered(self, read: Kept | GatheredView) -> str:
        """What has become of a parameter; "" if it is as it was."""
        if type(read) is GatheredView:
            assert self._run.gathered is not None
            return read.why_unreadable(self._run.gathered)
        assert type(read) is Kept
        if read.tensor.numel() and not read.tensor.untyped_storage().nbytes():
            return "freed"
        return "changed" if read.changed() else ""

    def _cannot_read(self, read: Kept | GatheredView, why: str = "") -> ReplayError:
        shape = list(read.size if isinstance(read, GatheredView) else read.tensor.shape)
        what = f"{self.name} cannot run again: a tensor of shape {shape} that it read was "
        if why == "freed" or (type(read) is Kept and _is_taken_away(read) and not why):
            return ReplayError(
                f"{what}freed afterwards (by FSDP or ZeRO-3, mostly).\nLet it live until backward has used it."
            )
        return ReplayError(f"{what}changed in place afterwards.\nChange it before the forward pass or after backward.")

    def forget(self) -> None:
        """It never runs again: what it read may go, though somebody still holds what came of it (a loss, mostly)."""
        self.outside, self._args, self._kwargs, self._completions = (), [], {}, ()

    def note_written(self) -> None:
        """What it read from outside was written where the tape saw it: through ``.data`` no version would tell."""
        self._written = True

    def run(self, transient: Transient) -> list[Tensor]:
        """What the op returns, flattened; ``transient``: inputs that were made again for this replay.

        Raises:
            ReplayError: a tensor that it read was changed in place since.
        """
        args = [self._resolved(a, transient) for a in self._args]
        kwargs = {name: self._resolved(a, transient) for name, a in self._kwargs.items()}
        with self._run.restored():
            with nullcontext() if self._rng is None else self._rng.restored():
                result = self._func(*args, **kwargs)
            made = list(tensors_in(result))
            for completion in self._completions:
                completion.run(made.__getitem__, lambda a: self._resolved(a, transient))
        return made

    def _stored(self, argument: Any, read: Mapping[int, StoredValue | None] = _NOT_LOOKED_UP) -> Any:
        if isinstance(argument, Tensor):
            value = read.get(id(argument), _UNKNOWN)
            if value is _UNKNOWN:
                storage = storage_of(argument)
                value = value_of_storage(storage, self._run)
            if value is None or self._run.windows is not None:
                storage = storage_of(argument)
                if storage is None:
                    raise UnreadableError("reads a tensor without one plain storage")
                if self._run.windows is not None and (found := self._gathered(argument, storage)) is not None:
                    self.gathered += (found,)
                    return found
            if value is None:
                # The memory as it is now, not the parameter: ``p.data = new`` must not reach a replay.
                kept = Kept(sharing_version(argument) if isinstance(argument, torch.nn.Parameter) else argument)
                self.outside += (kept,)
                return kept
            if argument.is_inference() or value.version != argument._version:
                raise UnreadableError("reads memory that was changed unseen")
            self.inputs += (value,)
            return Argument(value, argument)
        if isinstance(argument, (list, tuple)):
            return [self._stored(a, read) for a in argument]
        if type(argument) not in _PLAIN and isinstance(argument, torch.Generator):  # asking takes longer than an op
            raise UnreadableError("draws from a private generator")
        return argument

    def _gathered(self, argument: Tensor, storage: torch.UntypedStorage) -> Kept | GatheredView | None:
        """What names a parameter that is gathered and freed; None for any other tensor."""
        run, windows = self._run, self._run.windows
        assert windows is not None
        parameter = None if run.gathered is None else run.gathered.parameter_of(argument)
        if parameter is None and not windows.is_gathered(storage):
            return None
        if why := windows.why_out_of_reach(storage, parameter):
            raise UnreadableError(why)
        if parameter is None:
            return Kept(sharing_version(argument) if isinstance(argument, torch.nn.Parameter) else argument)
        if (view := gathered_view(argument, run)) is None:
            raise UnreadableError("reads a gathered parameter as another type")
        return view

    def _is_unreadable(self, kept: Kept) -> bool:
        """Written since, or its memory was taken away."""
        return kept.changed() or self._is_stepped(kept) or _is_taken_away(kept)

    def _is_stepped(self, kept: Kept) -> bool:
        return optimizer_steps.written_since(self._run.steps_before, kept.tensor)

    def _resolved(self, argument: Any, transient: Transient) -> Any:
        kind = type(argument)
        if kind is Argument:
            memory = transient.get(argument.value)
            if memory is None:
                memory = argument.value.memory()
            if memory is None:
                raise ReplayError(f"{self.name}: what it read is gone.\nThis is a bug in lowtide.")
            return argument.view_of(memory)
        if kind is Kept:
            if self._is_unreadable(argument):
                raise self._cannot_read(argument)
            return argument.tensor
        if kind is GatheredView:
            if why := self._why_not_gathered(argument):
                raise self._cannot_read(argument, why)
            return argument.tensor()
        return [self._resolved(a, transient) for a in argument] if kind is list else argument


def _is_taken_away(kept: Kept) -> bool:
    return kept.tensor.numel() > 0 and not kept.tensor.untyped_storage().nbytes()
