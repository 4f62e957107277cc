"""torchtitan's train.py, in a checkout of its repository, on random tokens: ``python torchtitan_script.py ARGUMENTS``.

The script is as published, and runs in its own folder. Neither its data nor a tokenizer is downloaded.
"""

import runpy
import sys
from collections.abc import Iterator
from unittest.mock import MagicMock

import torch

VOCABULARY = 128256


class Tokenizer:
    n_words = VOCABULARY


class Loader:
    def __init__(self, rows: int, tokens: int) -> None:
        self.shape = (rows, tokens)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield torch.randint(0, VOCABULARY, self.shape), torch.randint(0, VOCABULARY, self.shape)

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None: ...


def main() -> None:
    sys.path.insert(0, ".")
    sys.modules["torch.utils.tensorboard"] = MagicMock()
    import torchtitan.datasets

    torchtitan.datasets.build_tokenizer = lambda *_: Tokenizer()
    torchtitan.datasets.build_hf_data_loader = lambda name, path, tokenizer, rows, tokens, *_, **__: Loader(
        rows, tokens
    )
    sys.argv[0] = "train.py"
    runpy.run_path("train.py", run_name="__main__")


if __name__ == "__main__":
    main()
