"""The classic calls, ``checkpoint`` and ``checkpoint_sequential``, for code that checkpoints by hand.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (https://arxiv.org/abs/1604.06174). Differs: backward
runs recorded kernels again, never the user's Python, and only those that it needs.
"""

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._C import _get_dispatch_stack_at as mode_at
from torch._C import _len_torch_dispatch_stack as num_modes
from torch.utils.checkpoint import noop_context_fn

from lowtide.step import module_calls
from lowtide.step.function_calls import looked_up_late
from lowtide.tape.attach import cannot_tape
from lowtide.tape.online.dropping import DroppingTape
from lowtide.tape.online.online_tape import OnlineTape
from lowtide.tape.tape import Tape

_DIFFERENT_CONTEXTS = (
    "context_fn: backward does not run the function again here, so there is no second run to open a context around.\n"
    "Leave it out; what it chose to save, lowtide.fit(model, budget=...) chooses for each op. Contexts that your "
    "function needs,\nopen inside the function."
)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[..., Any] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """What ``function(*args, **kwargs)`` returns, without what autograd stores inside: backward makes that again.

    Takes what ``torch.utils.checkpoint.checkpoint`` takes. Gradients are bitwise those of the plain call. The function
    runs once: backward runs the recorded kernels again that it needs, so counters, hooks, BatchNorm statistics, caches
    and random generators move once, and nothing that changes between forward and backward changes the gradients. What
    cannot be made again bit by bit (custom operators, kernels that are not deterministic) is saved, as in the plain
    call.

    Calls may be nested. A fitted model's plan decides about everything in its calls: there, and without gradients, in
    compiled code and under ``torch.func``, this is the plain call.

    =====================  =============================================================================================
    option of torch's      here
    =====================  =============================================================================================
    use_reentrant          Makes no difference: there is one way, and it does what ``False`` does in torch.
    preserve_rng_state     Makes no difference: random ops always run again with the generator's state they had.
    determinism_check      Makes no difference: each kind of op is proven before its result is dropped.
    debug                  Makes no difference: errors name the op.
    early_stop             Makes no difference: ops that backward does not need are not run again.
    context_fn             Refused: there is no second run of the function.
    =====================  =============================================================================================

    As in torch, arguments with these names cannot be passed on to the function.

    Raises:
        ValueError: ``context_fn`` was given.
        ReplayError: in backward: an input was changed in place after the call, so that the kernels would give other
            bits. (The plain step allows that if autograd has not stored the input.)

    Example:
        >>> x = torch.randn(8, 16, requires_grad=True)
        >>> lowtide.checkpoint(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU()), x).sum().backward()
    """
    if context_fn is not noop_context_fn:
        raise ValueError(_DIFFERENT_CONTEXTS)
    if not torch.is_grad_enabled() or cannot_tape():
        return function(*args, **kwargs)
    observer = module_calls.thread_state.observer
    if isinstance(observer, DroppingTape):
        with observer.scope():
            return function(*args, **kwargs)
    if observer is not None or module_calls.thread_state.fitted_calls or _is_watched():
        return function(*args, **kwargs)
    modules = list(_modules_in(function))
    if any(map(module_calls.compiled_parts, modules)) or hasattr(function, "_torchdynamo_orig_callable"):
        _warn_of_compiled(getattr(function, "__qualname__", type(function).__qualname__))
        return function(*args, **kwargs)
    with DroppingTape(modules[0] if modules else None).around():
        return looked_up_late(function)(*args, **kwargs)


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[[Any], Any]],
    segments: int | str,
    input: Any,
    use_reentrant: bool | None = None,
    *,
    preserve_rng_state: bool = True,
) -> Any:
    """What the functions return, run one after another in ``segments``, each a ``checkpoint`` except the last.

    The last one's backward comes first, so there is nothing to gain. Segments are of equal length, give or take one
    function, longer ones first.

    Args:
        segments: How many; ``"sqrt"``: as many as the square root of the number of functions.
        use_reentrant, preserve_rng_state: Make no difference, as in ``checkpoint``.

    Raises:
        ValueError: there are more segments than functions, or none.
    """
    steps = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if segments == "sqrt":
        segments = max(1, round(math.sqrt(len(steps))))
    if not isinstance(segments, int) or not 1 <= segments <= max(1, len(steps)):
        raise ValueError(f'segments={segments!r} of {len(steps)} functions. Ask for 1 to {len(steps)}, or "sqrt".')
    length, longer = divmod(len(steps), segments)
    start = 0
    for segment in range(segments):
        end = start + length + (segment < longer)
        run = functools.partial(_run_in_turn, steps[start:end])
        input = run(input) if segment == segments - 1 else checkpoint(run, input)
        start = end
    return input


def _run_in_turn(functions: list[Callable[[Any], Any]], value: Any) -> Any:
    for function in functions:
        value = function(value)
    return value


def _is_watched() -> bool:
    """Whether a fitted model's step goes on here, between the model's call and backward."""
    return any(isinstance(mode_at(n), (Tape, OnlineTape)) for n in range(num_modes()))


def _modules_in(function: Any) -> Iterator[nn.Module]:
    """Modules that a call of ``function`` will run, as far as it shows: itself, whose method it is, what it closes
    over."""
    todo, seen = [function], 0
    while todo and seen < 100:
        seen += 1
        found = todo.pop()
        if isinstance(found, nn.Module):
            yield found
        elif isinstance(found, functools.partial):
            todo += [found.func, *found.args, *found.keywords.values()]
        elif isinstance(found, (list, tuple)):
            todo += found
        elif inspect.ismethod(found):
            todo.append(found.__self__)
        elif inspect.isfunction(found):
            todo += [cell.cell_contents for cell in found.__closure__ or () if _is_filled(cell)]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _warn_of_compiled(name: str) -> None:
    warnings.warn(
        f"lowtide.checkpoint: {name} runs compiled code, whose inside is not seen: it is called as it is, and all "
        "that it stores is saved. Compile without the checkpoint, or checkpoint what is not compiled.",
        stacklevel=3,
    )
