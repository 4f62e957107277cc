"""Where every form of ``torch.utils.checkpoint`` passes: seen there, or replaced by a plain call.

``checkpoint`` looks both implementations up in its module when it is called. So a partial of it that a library made
long ago, ``checkpoint_sequential`` and ``checkpoint_wrapper`` all pass here.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch.utils import checkpoint as torch_checkpoint

Policy = Callable[..., Any]
# From PyTorch 2.14 on, ``checkpoint`` calls this one, which takes the function's arguments apart from the options.
_APART = "_checkpoint_without_reentrant_generator_impl"
_IS_APART = hasattr(torch_checkpoint, _APART)
_OPTIONS = "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"  # in their order up to 2.13


class CheckpointObserver(Protocol):
    """Is told of every call of a checkpoint and of every time that its function runs."""

    def begin(self, function: Any, args: tuple, kwargs: dict, *, reentrant: bool, preserve_rng_state: bool) -> Any: ...
    def running(self, call: Any, *, again: bool = False) -> AbstractContextManager[None]: ...
    def contexts(self, call: Any, contexts: Any) -> None: ...


@contextmanager
def plain_calls(only: Collection[int] | None = None) -> Iterator[None]:
    """Inside, a checkpointed call is a plain call.

    Args:
        only: Numbers of the calls, in the order they come, that are plain; all of them by default.
    """
    numbers = iter(range(2**62))

    def is_plain() -> bool:
        return torch.is_grad_enabled() and (next(numbers) in only if only is not None else True)

    generator, function = _generator(), torch_checkpoint.CheckpointFunction

    def plain_generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        if is_plain():
            yield
        else:
            yield from generator(*args, **kwargs)

    class PlainFunction:
        @staticmethod
        def apply(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return run(*args) if is_plain() else function.apply(run, preserve, *args)

    with _replaced(plain_generator, PlainFunction):
        yield


@contextmanager
def changed_policies(change: Callable[[Policy], Policy]) -> Iterator[None]:
    """Inside, selective checkpointing asks ``change(policy)`` in place of the policy."""
    generator, function = _generator(), torch_checkpoint.CheckpointFunction

    def asking_another(
        run: Any, args: tuple, kwargs: dict, *, context_fn: Any = torch_checkpoint.noop_context_fn, **options: Any
    ) -> Iterator[None]:
        def look(made: Any) -> None:
            for mode in made:
                if isinstance(mode, torch_checkpoint._CachingTorchDispatchMode):
                    mode.policy_fn = change(mode.policy_fn)

        yield from generator(run, args, kwargs, context_fn=_looked_at(context_fn, look), **options)

    with _replaced(asking_another, function):
        yield


@contextmanager
def observed_calls(observer: CheckpointObserver) -> Iterator[None]:
    """Inside, ``observer`` is told of every checkpointed call."""
    generator, function = _generator(), torch_checkpoint.CheckpointFunction

    def again(call: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with observer.running(call, again=True):
            return run(*args, **kwargs)

    def observed_generator(
        run: Any, args: tuple, kwargs: dict, *, preserve_rng_state: bool = True,
        context_fn: Any = torch_checkpoint.noop_context_fn, **options: Any,
    ) -> Iterator[None]:  # fmt: skip
        call = observer.begin(run, args, kwargs, reentrant=False, preserve_rng_state=preserve_rng_state)
        options |= dict(
            preserve_rng_state=preserve_rng_state,
            context_fn=_looked_at(context_fn, functools.partial(observer.contexts, call)),
        )
        inner = generator(functools.partial(again, call, run), args, kwargs, **options)
        next(inner)
        try:
            with observer.running(call):
                yield
        except BaseException as error:
            inner.throw(error)
            raise
        yield from inner

    class ObservedFunction:
        @staticmethod
        def apply(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            call = observer.begin(run, args, {}, reentrant=True, preserve_rng_state=preserve)
            has_run = False

            def seen(*given: Any) -> Any:
                nonlocal has_run
                if has_run:
                    return again(call, run, *given)
                has_run = True
                with observer.running(call):
                    return run(*given)

            return function.apply(seen, preserve, *args)

    with _replaced(observed_generator, ObservedFunction):
        yield


def _looked_at(context_fn: Callable[[], Any], look: Callable[[Any], None]) -> Callable[[], Any]:
    """``context_fn``, whose contexts ``look`` gets; PyTorch knows the one that makes none by identity."""

    def contexts() -> Any:
        made = context_fn()
        look(made)
        return made

    return context_fn if context_fn is torch_checkpoint.noop_context_fn else contexts


def _generator() -> Callable[..., Any]:
    """What surrounds a checkpointed call that is not reentrant, called as PyTorch 2.14 calls it."""
    if _IS_APART:
        return getattr(torch_checkpoint, _APART)
    together = torch_checkpoint._checkpoint_without_reentrant_generator

    def apart(run: Any, args: tuple, kwargs: dict, **options: Any) -> Iterator[None]:
        return together(run, *map(options.get, _OPTIONS), *args, **kwargs)

    return apart


def _replaced(generator: Callable[..., Iterator[None]], function: Any) -> AbstractContextManager[Any]:
    if _IS_APART:
        return patch.multiple(
            torch_checkpoint, CheckpointFunction=function, _checkpoint_without_reentrant_generator_impl=generator
        )

    def together(
        run: Any, preserve_rng_state: bool = True, context_fn: Any = torch_checkpoint.noop_context_fn,
        determinism_check: str = "default", debug: bool = False, early_stop: bool = True, *args: Any, **kwargs: Any,
    ) -> Iterator[None]:  # fmt: skip
        options = dict(zip(_OPTIONS, (preserve_rng_state, context_fn, determinism_check, debug, early_stop)))
        return generator(run, args, kwargs, **options)

    return patch.multiple(
        torch_checkpoint, CheckpointFunction=function, _checkpoint_without_reentrant_generator=together
    )


def held_by(function: Any) -> list[Any]:
    """What a function brings along beside its arguments: bound objects, partial arguments, what it closes over."""
    found: list[Any] = []
    todo, seen = [function], 0
    while todo and seen < 200:
        seen += 1
        item = todo.pop()
        if isinstance(item, functools.partial):
            todo += [item.func, *item.args, *item.keywords.values()]
        elif inspect.ismethod(item):
            todo += [item.__self__, item.__func__]
        elif inspect.isfunction(item):
            for cell in item.__closure__ or ():
                try:
                    todo.append(cell.cell_contents)
                except ValueError:  # not filled yet
                    continue
        elif isinstance(item, Mapping):
            todo += item.values()
        elif isinstance(item, (list, tuple)):
            todo += item
        else:
            found.append(item)
    return found
