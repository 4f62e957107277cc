"""What others have in place: saved-tensor hooks, and code on the stack.

While hooks of others are the innermost, they get what autograd stores, and lowtide does not.
"""

import sys
from types import FrameType

from torch._C._autograd import _top_saved_tensors_default_hooks as top_hooks

CHECKPOINT = "torch.utils.checkpoint"  # the module that such hooks are of


def hooks_of_others() -> tuple[str, str]:
    """Module and name of what has put the innermost hooks in place; empty where that is lowtide, or nobody."""
    hooks = top_hooks(True)
    module = getattr(hooks[0], "__module__", None) or "" if hooks is not None else ""
    if hooks is None or module.startswith("lowtide."):
        return "", ""
    name = getattr(hooks[0], "__qualname__", type(hooks[0]).__qualname__)
    return module, name.partition(".<locals>")[0].removesuffix(".__init__")


def frame_in(module: str) -> FrameType | None:
    """The innermost frame of the stack that runs code of this module; None: there is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame
