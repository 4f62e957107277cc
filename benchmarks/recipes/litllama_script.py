"""A script of lit-llama's, in a checkout of its repository: ``python litllama_script.py CHECKOUT SCRIPT [TOKENS]``.

The script is as published; its data are random tokens, TOKENS to a sample, and its pretrained weights are left out.
"""

import os
import runpy
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch


def main() -> None:
    checkout, script, *tokens = sys.argv[1:]
    os.chdir(tempfile.mkdtemp())
    Path("data/shakespeare").mkdir(parents=True)
    for part in ("train", "val"):
        np.random.randint(0, 100, 100_000).astype(np.uint16).tofile(f"data/shakespeare/{part}.bin")
    if tokens:
        samples = [dict.fromkeys(("input_ids", "labels"), torch.ones(int(tokens[0]), dtype=torch.int64))] * 64
        Path("data/alpaca").mkdir()
        Path("checkpoints/lit-llama/7B").mkdir(parents=True)
        torch.save({}, "checkpoints/lit-llama/7B/lit-llama.pth")
        for part in ("train", "test"):
            torch.save(samples, f"data/alpaca/{part}.pt")
    sys.path.insert(0, checkout)
    path = Path(checkout) / script
    sys.argv = [script]
    runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main()
