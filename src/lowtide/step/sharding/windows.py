"""When the parameters of a sharded model are whole: while certain module calls run, forward and again in backward.

A *window* is such a call. What is made in a window can be made again in it, because its parameters are gathered before
its backward begins. What is made in a window and read outside *crosses*: it is saved.
"""

import weakref
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import nn

from lowtide.step.sharding.units import states_of, units_of, whole_tensors
from lowtide.step.sharding.zero3 import gathered_parameters_of, windows_of

CROSSES = "crosses the boundary of a sharded unit"
OUT_OF_WINDOW = "reads a parameter outside the module that it is gathered for"
NOT_AGAIN = "is not gathered in backward"
NO_WINDOWS: frozenset[int] = frozenset()


class Windows:
    """Which modules of a model are windows.

    Attributes:
        parameters: By module, what ZeRO-3 gathers for it and frees after it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        of_zero3 = gathered_parameters_of(model) is not None
        self.parameters: dict[str, list[nn.Parameter]] = windows_of(model) if of_zero3 else {}

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None  # it runs
        return model

    @cached_property  # and not before: FSDP decides when the first forward pass begins
    def paths(self) -> frozenset[str]:
        """Modules whose parameters are freed when their forward pass ends."""
        states = states_of(self.model)
        freed = [path for path, state in states if any(u._reshard_after_forward for u in state._fsdp_param_groups)]
        return frozenset((*freed, *self.parameters))

    @cached_property
    def gathered_for(self) -> dict[nn.Parameter, set[str]]:
        """By parameter of ZeRO-3, the modules in whose windows it is whole."""
        found: dict[nn.Parameter, set[str]] = {}
        for path, parameters in self.parameters.items():
            for p in parameters:
                found.setdefault(p, set()).add(path)
        return found


class OpenWindows:
    """The windows that are open in a step as its forward pass goes on, by number of the call; what is gathered."""

    def __init__(self, model: nn.Module) -> None:
        self._windows = Windows(model)
        self._calls: list[tuple[str, int]] = []  # open, whether windows or not
        self._around: frozenset[int] | None = NO_WINDOWS
        self._gathered: dict[int, bool] = {}  # storage that FSDP gathers into -> whether backward gathers it again
        for unit in units_of(model):
            self.note_gathered(whole_tensors(unit), again=unit.unshard_in_backward)

    def enter(self, path: str, number: int) -> None:
        self._calls.append((path, number))
        self._around = None

    def leave(self) -> None:
        if self._calls:
            self._calls.pop()
        self._around = None

    @property
    def around(self) -> frozenset[int]:
        """The open ones."""
        if self._around is None:
            self._around = frozenset(number for path, number in self._calls if path in self._windows.paths)
        return self._around

    @property
    def around_caller(self) -> frozenset[int]:
        """Those that stay open when the present module call ends."""
        return self.around - {number for _, number in self._calls[-1:]}

    def note_gathered(self, whole: list[torch.Tensor], *, again: bool) -> None:
        """FSDP has gathered into these, or will."""
        self._gathered.update((t.untyped_storage()._cdata, again) for t in whole)

    def gathered_already(self) -> Iterator[torch.Tensor]:
        """What FSDP has whole now."""
        model = self._windows.model
        for unit in units_of(model):
            yield from (t for t in whole_tensors(unit) if t.untyped_storage().nbytes())

    def is_gathered(self, storage: torch.UntypedStorage) -> bool:
        """Whether FSDP gathers and frees the memory of ``storage``."""
        return storage._cdata in self._gathered

    def why_out_of_reach(self, storage: torch.UntypedStorage, parameter: nn.Parameter | None) -> str:
        """Why what is read here will not be whole when backward comes here; "" if it will.

        Args:
            parameter: Of ZeRO-3, that ``storage`` is of.
        """
        if not self._gathered.get(storage._cdata, True):
            return NOT_AGAIN
        paths = self._windows.gathered_for.get(parameter) if parameter is not None else None
        if paths is not None and paths.isdisjoint(path for path, _ in self._calls):
            return OUT_OF_WINDOW
        return ""
