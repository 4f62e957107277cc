"""nanoGPT's train.py, in a checkout of its repository: ``python nanogpt_script.py CHECKOUT ARGUMENTS [--no-sdpa]``.

The script is as published; its data are random tokens. A pretrained GPT-2 has its configuration and weights of zeros.
With ``--no-sdpa`` PyTorch has no ``scaled_dot_product_attention``, as before 2.0: the script asks whether it has.
"""

import json
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

SIZES = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600)}


def main() -> None:
    checkout, *arguments = sys.argv[1:]
    if "--no-sdpa" in arguments:
        arguments.remove("--no-sdpa")
        del torch.nn.functional.scaled_dot_product_attention
    here = Path(tempfile.mkdtemp())
    for file in Path(checkout).glob("*.py"):
        shutil.copy(file, here)
    shutil.copytree(Path(checkout) / "config", here / "config")
    for dataset in ("openwebtext", "shakespeare"):
        (here / "data" / dataset).mkdir(parents=True)
        for part in ("train", "val"):
            np.random.randint(0, 50000, 200_000).astype(np.uint16).tofile(here / "data" / dataset / f"{part}.bin")
    for name, (layers, heads, width) in SIZES.items():
        (here / name).mkdir()
        config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": layers, "n_head": heads,
                  "n_embd": width, "n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257}  # fmt: skip
        (here / name / "config.json").write_text(json.dumps(config))
    sys.modules.update(dict.fromkeys(("datasets", "pandas", "sklearn")))  # of today: not for transformers of then
    os.chdir(here)
    sys.path.insert(0, str(here))
    sys.argv = ["train.py", *arguments]
    runpy.run_path("train.py", run_name="__main__")


if __name__ == "__main__":
    main()
