"""Which attention kernel PyTorch chooses on a CUDA device, over all combinations of what it looks at.

    python attention_choices.py          adds this PyTorch's choices on this device to results/attention_choices.json

``tests/hollow/test_attention.py`` compares lowtide's own choice with them. cuDNN's attention is switched off: lowtide
counts its memory as flash attention's.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

RESULTS = Path(__file__).parent / "results" / "attention_choices.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = ((64, 64), (36, 36), (80, 80), (97, 97), (128, 128), (200, 200), (256, 256), (264, 264), (96, 64))
MASKS = ("none", "bool", "float", "one row")
BATCH, HEADS, TOKENS = 2, 4, 16
# How many heads keys and values have, and whether the caller says that they are grouped.
KEY_HEADS = {"as queries": (4, 4, False), "grouped": (2, 2, True), "one": (1, 1, False), "fewer": (2, 2, False),
             "fewer values": (4, 1, True)}  # fmt: skip


class Case(NamedTuple):
    """What decides; ``widths``: of a query's and a value's head."""

    dtype: torch.dtype
    widths: tuple[int, int]
    heads: str
    mask: str
    causal: bool
    dropout: float
    trains: bool
    square: bool

    def arguments(self, device: str) -> tuple[list[torch.Tensor | None], dict[str, Any]]:
        """Of ``scaled_dot_product_attention``: query, key, value and mask; the others by name."""

        def empty(*size: int) -> torch.Tensor:
            return torch.empty(*size, dtype=self.dtype, device=device, requires_grad=self.trains)

        keys, (width, value_width) = TOKENS if self.square else 2 * TOKENS, self.widths
        key_heads, value_heads, is_grouped = KEY_HEADS[self.heads]
        mask = None
        if self.mask == "bool":
            mask = torch.ones(BATCH, 1, TOKENS, keys, dtype=torch.bool, device=device)
        elif self.mask != "none":
            rows = 1 if self.mask == "one row" else TOKENS
            mask = torch.zeros(BATCH, 1, rows, keys, dtype=self.dtype, device=device).expand(BATCH, 1, TOKENS, keys)
        given = [
            empty(BATCH, HEADS, TOKENS, width), empty(BATCH, key_heads, keys, width),
            empty(BATCH, value_heads, keys, value_width), mask,
        ]  # fmt: skip
        return given, {"dropout_p": self.dropout, "is_causal": self.causal, "enable_gqa": is_grouped}


def cases() -> Iterator[Case]:
    """In the order of the results. A causal mask beside another is refused by PyTorch."""
    flags = (False, True)
    for case in itertools.product(DTYPES, WIDTHS, KEY_HEADS, MASKS, flags, (0.0, 0.1), flags, flags):
        if not (case[3] != "none" and case[4]):
            yield Case(*case)


def chosen_by_pytorch() -> str:
    """A digit for each case: PyTorch's number of the kernel (``SDPBackend``)."""
    digits = []
    torch.backends.cuda.enable_cudnn_sdp(False)
    for case in cases():
        given, named = case.arguments("cuda")
        digits.append(str(torch._fused_sdp_choice(*given, **named)))
    return "".join(digits)


def place() -> str:
    """The key of the results: PyTorch's release and the device's compute capability."""
    release = torch.__version__.partition("+")[0]
    return f"torch {release}, compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))}"


def main() -> int:
    if not torch.cuda.is_available():
        print("this PyTorch finds no CUDA device", file=sys.stderr)
        return 2
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[place()] = chosen_by_pytorch()
    RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    print(place(), len(known[place()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
