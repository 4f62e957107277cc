"""Global state that decides an op's bits: random generators, numeric flags, threads, autocast."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._C import _current_graph_task_id as graph_task

from lowtide.device.generators import set_state, state_of, with_state
from lowtide.device.numeric_flags import numeric_flags, with_numeric_flags
from lowtide.step import optimizer_steps
from lowtide.step.sharding.windows import OpenWindows
from lowtide.step.sharding.zero3 import gathered_parameters_of
from lowtide.step.storage_bits import SealsOnDevice
from lowtide.step.subclasses import WrapperVersions, wrapped_parameters


class GeneratorState:
    """State of one device's default generator, taken before a random op runs."""

    __slots__ = ("_device", "_state")

    def __init__(self, device: torch.device) -> None:
        self._device, self._state = device, state_of(device)

    @property
    def storage(self) -> torch.UntypedStorage:
        """Its memory, on the CPU: of a CPU's generator 5 kB, of other devices' a few bytes."""
        return self._state.untyped_storage()

    def restored(self) -> AbstractContextManager[None]:
        """Inside, the generator has this state; afterwards, the present one again."""
        return with_state(self._device, self._state)

    def put_back(self) -> None:
        """The generator has this state from now on: what was drawn since is drawn again."""
        set_state(self._device, self._state)


class ExecutionState:
    """What a replay needs to know of its forward pass: the model, and the global flags.

    Another thread count, TF32 or determinism setting gives other bits.

    Attributes:
        flags: The global ones.
        gathered: Where the model's parameters are, if ZeRO-3 gathers and frees them.
        windows: Of a sharded model in a step without a plan: where its parameters are whole.
        on_difference: In a rehearsal: called with each op whose replay gives other bits, which is no error there.
        knows_passes: The plan counts replays over all backward passes of the step (``Plan.passes``).
        most_unsplit_bytes: In a step without a plan: what a block may count beyond what is asked for.
        stream: In a step without a plan on an accelerator: where the forward pass runs, and so replays.
        steps_before: How many steps of optimizers had been seen before the forward pass.
        seals: On a device: what is sealed there, once something is.
    """

    __slots__ = (
        "_model",
        "_steps_in_task",
        "_versions",
        "flags",
        "gathered",
        "knows_passes",
        "most_unsplit_bytes",
        "on_difference",
        "seals",
        "steps_before",
        "stream",
        "windows",
    )

    def __init__(self, model: Callable[[], nn.Module | None], *, wrapped: bool = False) -> None:
        self.flags = numeric_flags()
        self._model = model
        self.gathered = gathered_parameters_of(model())
        self.most_unsplit_bytes = 0
        owner = model() if wrapped else None
        self._versions = None if owner is None else WrapperVersions(wrapped_parameters(owner))
        self.windows: OpenWindows | None = None
        self.seals: SealsOnDevice | None = None
        self.on_difference: Callable[[Any], None] | None = None
        self.stream: torch.Stream | None = None
        self.knows_passes = False
        self._steps_in_task = (-1, False)  # of the last backward that was asked for: its number, and the answer
        optimizer_steps.watch()
        self.steps_before = optimizer_steps.count

    @property
    def is_sharded(self) -> bool:
        """Parameters are parts of sharded ones."""
        return self._versions is not None

    def steps_in_backward(self) -> bool:
        """Whether an optimizer may be fused into backward.

        Then a second backward finds other weights, and a write through ``.data`` changes no version.
        """
        task = graph_task()
        if task == -1 or self._steps_in_task[0] != task:  # a backward asks once for each sealed tensor
            model = self._model()
            steps = model is not None and any(p._post_accumulate_grad_hooks for p in model.parameters())
            self._steps_in_task = task, steps
        return self._steps_in_task[1]

    def catch_up(self) -> None:
        """Parts of a parameter that an optimizer has written count that too: recipes that read them refuse."""
        if self._versions is not None:
            self._versions.catch_up()

    def restored(self) -> AbstractContextManager[None]:
        """Inside, the flags are as they were in the forward pass."""
        self.catch_up()
        return nullcontext() if numeric_flags() == self.flags else with_numeric_flags(self.flags)


def no_autocast() -> AbstractContextManager[None]:
    """Switch autocast off: recipes hold casts as ops, and autocast around ``backward()`` must not add others."""
    return torch._C._DisableAutocast() if torch._C._is_any_autocast_enabled() else nullcontext()
