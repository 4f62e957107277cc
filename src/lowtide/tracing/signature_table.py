"""The kinds of ops in a step: same operator on tensors of the same shapes and types; what the first of each tells.

A kind's first call is watched: what the kernel allocates for itself, and which inputs it changes though its schema says
that it only reads them.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from lowtide.measurement.allocator import run_with_workspace
from lowtide.measurement.op_inputs import describe
from lowtide.tracing.operators import SENDERS, fingerprint, writes_unsaid


class SignatureTable:
    """Signatures by number.

    Attributes:
        signatures: As plain data: what ``costs`` makes inputs from.
        workspace_bytes: What a kernel of this kind allocates beside its outputs.
    """

    def __init__(self, device: torch.device) -> None:
        self.signatures: list[dict] = []
        self.workspace_bytes: dict[int, int] = {}
        self._device = device
        self._numbers: dict[str, int] = {}
        self._hidden_writes: dict[int, list[int]] = {}  # positions among the tensors that it is given

    def add(self, body: dict) -> int:
        """A signature of its own, whatever others there are."""
        self.signatures.append(body)
        return len(self.signatures) - 1

    def of(self, func: Any, args: tuple, kwargs: dict) -> int:
        """The number of this call's signature."""
        body = describe(func, args, kwargs)
        text = json.dumps(body, sort_keys=True)
        if text not in self._numbers:
            self._numbers[text] = self.add(body)
        return self._numbers[text]

    def is_new(self, signature: int) -> bool:
        return signature not in self.workspace_bytes

    def first_run(self, signature: int, func: Any, args: tuple, kwargs: dict, inputs: list[torch.Tensor]) -> Any:
        """Run the op, watching it; no dispatch mode may listen meanwhile."""
        if func.namespace in SENDERS:  # what they write may come after the call has returned: no use looking
            self._hidden_writes[signature] = list(range(len(inputs))) if writes_unsaid(func) else []
            self.workspace_bytes[signature] = 0
            return func(*args, **kwargs)
        before = [fingerprint(t) for t in inputs]
        result, workspace, _ = run_with_workspace(lambda: func(*args, **kwargs), self._device)
        self._hidden_writes[signature] = [i for i, t in enumerate(inputs) if fingerprint(t) != before[i]]
        self.workspace_bytes[signature] = workspace or 0
        return result

    def hidden_writes(self, signature: int) -> list[int]:
        """Positions of the inputs that this kind changes without saying so."""
        return self._hidden_writes.get(signature, [])
