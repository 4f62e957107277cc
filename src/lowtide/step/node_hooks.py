"""Code that runs right before and right after one node of autograd, in each backward that comes to it."""

from collections.abc import Callable
from typing import Any

from lowtide.step.module_calls import never_compiled


def call_around(node: Any, begin: Callable[[Any], None], end: Callable[[Any, Any], None]) -> None:
    """Call ``begin`` with the gradients that ``node`` is given, and ``end`` with what it made and those."""
    node.register_prehook(never_compiled(begin))
    node.register_hook(never_compiled(end))
