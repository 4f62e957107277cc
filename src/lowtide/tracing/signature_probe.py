"""What the first op of each signature shows: same operator on tensors of the same shapes and types.

Its run is watched for what the kernel allocates beside its outputs, and for inputs that it changes though its schema
says that it only reads them.
"""

import json
from typing import Any

import torch

from lowtide.measurement.allocator import run_with_workspace
from lowtide.measurement.op_inputs import describe
from lowtide.tracing.graph_builder import GraphBuilder
from lowtide.tracing.operators import COMMUNICATES, fingerprint, may_write_undeclared


class SignatureProbe:
    """Numbers signatures, and runs the first op of each under watch."""

    def __init__(self, builder: GraphBuilder, device: torch.device) -> None:
        self.workspace_bytes: dict[int, int] = {}  # by signature
        self.undeclared_writes: dict[int, list[int]] = {}  # by signature, positions of inputs
        self._builder, self._device = builder, device
        self._numbers: dict[str, int] = {}

    def signature_of(self, func: Any, args: tuple, kwargs: dict) -> int:
        """The number of this call's signature."""
        signature = describe(func, args, kwargs)
        text = json.dumps(signature, sort_keys=True)
        if text not in self._numbers:
            self._numbers[text] = self._builder.add_signature(signature)
        return self._numbers[text]

    def run(self, signature: int, func: Any, args: tuple, kwargs: dict, inputs: list[torch.Tensor]) -> Any:
        """What ``func`` returns."""
        if signature in self.workspace_bytes:
            return func(*args, **kwargs)
        with self._builder.ignoring_ops():
            if func.namespace in COMMUNICATES:  # what they write may come after the call has returned: no use looking
                self.undeclared_writes[signature] = list(range(len(inputs))) if may_write_undeclared(func) else []
                self.workspace_bytes[signature] = 0
                return func(*args, **kwargs)
            before = [fingerprint(t) for t in inputs]
            result, workspace, _ = run_with_workspace(lambda: func(*args, **kwargs), self._device)
            self.undeclared_writes[signature] = [i for i, t in enumerate(inputs) if fingerprint(t) != before[i]]
            self.workspace_bytes[signature] = workspace or 0
            return result
