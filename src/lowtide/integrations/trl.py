"""What TRL's trainers bring that a plan does not go with. The rest of them is transformers' Trainer."""

from typing import Any

from lowtide.errors import IntegrationError
from lowtide.integrations.versions import check_version


def is_of_trl(args: Any) -> bool:
    """Whether ``args`` are those of a TRL trainer."""
    return any(cls.__module__.startswith("trl.") for cls in type(args).__mro__)


def check_version_of(args: Any) -> None:
    """Refuse arguments of a TRL that nobody has tried.

    Raises:
        IntegrationError: with the version found and the range.
    """
    if is_of_trl(args):
        check_version("trl")


def check_arguments(args: Any) -> None:
    """Look at ``args`` if they are those of a TRL trainer.

    Raises:
        IntegrationError: a version that nobody has tried, or ``activation_offloading``.
    """
    check_version_of(args)
    if is_of_trl(args) and getattr(args, "activation_offloading", False):
        raise IntegrationError(
            "activation_offloading=True moves activations that a plan decides about; the innermost of the two would "
            "win.\nSet activation_offloading=False: lowtide offloads where that is cheaper than recomputing."
        )
