"""The errors lowtide raises on purpose. Each message says what, with values; the facts; the way out."""

from collections.abc import Callable


class LowtideError(Exception):
    """Base of every error lowtide raises itself."""


class BudgetInfeasibleError(LowtideError):
    """No plan of this method stays within the budget.

    Attributes:
        budget_bytes: The peak that was asked for, absolute bytes.
        least_bytes: The least peak the method reaches, absolute bytes; asking for it succeeds.
        proven_bytes: No plan of any method needs less, absolute bytes; 0 where nothing is proven. A budget from here up
            to ``least_bytes`` was not met, and may not be impossible.
    """

    # With defaults, so that a rank can send its error to the others: unpickling passes the message alone.
    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int = 0,
        least_bytes: int = 0,
        proven_bytes: int = 0,
        searched: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        """``searched``: finds ``least_bytes`` and ``proven_bytes`` when one is first asked for: it takes long."""
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self._amounts, self._searched = (least_bytes, proven_bytes), searched

    def _found(self) -> tuple[int, int]:
        if self._searched is not None:
            self._amounts, self._searched = self._searched(), None
        return self._amounts

    @property
    def least_bytes(self) -> int:
        return self._found()[0]

    @property
    def proven_bytes(self) -> int:
        return self._found()[1]

    def __reduce__(self) -> tuple:
        self._found()  # a search cannot be sent
        return type(self), self.args, vars(self)


class BudgetExceededError(LowtideError):
    """A step took more than the budget, and ``fit(on_excess="raise")`` was asked for. Its gradients are whole.

    Attributes:
        budget_bytes: What it may take, absolute bytes. peak_bytes: What it took, as the allocator counted it.
    """

    def __init__(self, message: str, *, budget_bytes: int = 0, peak_bytes: int = 0) -> None:
        super().__init__(message)
        self.budget_bytes, self.peak_bytes = budget_bytes, peak_bytes


class PlannerFailedError(LowtideError):
    """Planning beside training failed, or was ended, before there was a plan; the message says how."""


class PlanMismatchError(LowtideError):
    """A plan was used with a graph or a model it was not made for."""


class ReplayError(LowtideError):
    """A dropped tensor cannot be brought back exactly; raised before any gradient is computed from it."""


class UnsupportedModelError(LowtideError):
    """The model needs something the tape does not carry out yet; refused by name, never run wrongly."""


class TierError(LowtideError):
    """A tier that a plan moves storages to is not there, is full, or fails; raised before any gradient is computed from
    what it lost."""


class DeviceError(LowtideError):
    """A device that is not on this machine, or that lacks what was asked of it; the message names it."""


class UnsupportedPyTorchError(LowtideError, ImportError):
    """The installed PyTorch lacks a part of its own that lowtide needs; the message names it and the versions that have
    it."""


class MissingPackageError(LowtideError, ImportError):
    """An optional package that was asked for is not installed; the message says how to get it."""


class RehearsalMemoryError(LowtideError):
    """A rehearsal of lowtide's own ran out of memory however small it was; nothing of the training state moved."""


class LostMemoryError(LowtideError):
    """What a step holds was in host memory for a moment, and the device has no place for it any more.

    Nothing was computed from it. The step is lost; parameters, gradients and what was there before it are not.
    """

    def __init__(self, size_bytes: int) -> None:
        super().__init__(
            f"memory ran out: {size_bytes} bytes that the step holds were moved to host memory to make room, and the "
            "device has no place for them any more: somebody else took it. Nothing was computed from them.\n"
            "Free memory on the device, or reduce the batch, and run the step again."
        )
        self.size_bytes = size_bytes

    def __reduce__(self) -> tuple:
        return type(self), (self.size_bytes,)


class GraphFormatError(LowtideError, ValueError):
    """A graph, costs or plan file is damaged or from an unknown version; the message names the field."""


class StepError(LowtideError, ValueError):
    """The training step itself cannot be planned: it fails, has no scalar loss, or trains nothing."""


class IntegrationError(LowtideError):
    """A library's version or settings that lowtide does not work with; raised before training starts."""


class SettingsError(LowtideError, ValueError):
    """Checkpointing settings that their own library refuses, or that contradict each other or mean nothing at all."""
