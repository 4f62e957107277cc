"""transformers' ``generate`` goes on to its greatest length where values are skipped.

A token drawn from logits of zeros is the first one, or any: a model whose end it is would stop at once. And memory has
to hold the longest answer.
"""

import os
from typing import Any

from cuda_standin import imports
from cuda_standin.script import record


def install() -> None:
    if "STANDIN_SKIP_BYTES" in os.environ:
        imports.after_import("transformers.generation.stopping_criteria", _goes_on)


def _goes_on(module: Any) -> None:
    ends = getattr(module, "EosTokenCriteria", None)  # since transformers 4.39
    if ends is None:
        return
    said = ends.__call__

    def no_token_ends(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        ended = said(self, input_ids, *args, **kwargs)
        if not input_ids.is_cuda:
            return ended
        record.notes.add("transformers' generate goes on to its greatest length: no token ends an answer")
        return ended.zero_()

    ends.__call__ = no_token_ends
