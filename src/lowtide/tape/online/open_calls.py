"""The module calls that are open in a step: where an op runs, and which ran before it."""

from lowtide.step.other_hooks import CHECKPOINT, hooks_of_others


class OpenCalls:
    """Those of one step.

    Attributes:
        path: Of the innermost open call; "" outside all.
        layer: Number of the open layer's call, a layer being a numbered module; 0 outside layers.
        count: Calls that have begun. ``modules_run``: a hash of which they were, in order.
        checkpointed: The first that began inside ``torch.utils.checkpoint``; "" if none did.
        other_hooks: What has put saved-tensor hooks in place around a call; "" if nothing has.
    """

    def __init__(self) -> None:
        self.path = self.checkpointed = self.other_hooks = ""
        self.layer = self.count = self.modules_run = 0
        self._num_ops = 0  # of the innermost open call so far
        self._outer: list[tuple[str, int, int]] = []  # path, layer and number of ops of those around it

    def enter(self, path: str) -> None:
        self.begin()
        self.modules_run = hash((self.modules_run, path))
        if not (self.checkpointed and self.other_hooks):
            module, name = hooks_of_others()
            if module == CHECKPOINT:
                self.checkpointed = self.checkpointed or path or "a part of the model"
            elif name and not self.other_hooks:
                self.other_hooks = f"{module}.{name}"
        self._outer.append((self.path, self.layer, self._num_ops))
        self.path, self._num_ops = path, 0
        if not self.layer and path.rpartition(".")[2].isdigit():
            self.layer = self.count

    def begin(self) -> None:
        """One has begun whose ops ran before this was there."""
        self.count += 1

    def leave(self) -> int:
        """The innermost one ends. Returns its number if it was a layer's; else 0."""
        layer = self.layer
        if self._outer:
            self.path, self.layer, self._num_ops = self._outer.pop()
        return layer if layer != self.layer else 0

    def note_op(self) -> None:
        """An op has run."""
        self._num_ops += 1

    @property
    def place(self) -> tuple[str, int]:
        """Of the last op: its call, and its position there."""
        return self.path, self._num_ops
