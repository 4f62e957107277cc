"""Parameters that the traced step itself writes (``p.data.mul_(...)``, mostly): copied before, put back after."""

import torch


class WrittenParameters:
    """Storage ids of the parameters that the step has written, and their bytes as they were."""

    def __init__(self) -> None:
        self.storages: set[int] = set()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, tensor: torch.Tensor, storage: int) -> None:
        """``tensor`` is about to be written; only the first time counts."""
        if storage in self.storages:
            return
        self.storages.add(storage)
        memory = tensor.untyped_storage()
        now = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
        self._copies.append((now, now.clone()))

    def restore(self) -> None:
        while self._copies:
            now, before = self._copies.pop()
            now.copy_(before)
