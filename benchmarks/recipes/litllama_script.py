"""lit-llama's train.py, in a checkout of its repository: ``python litllama_script.py CHECKOUT``.

The script is as published; its data are random tokens.
"""

import os
import runpy
import sys
import tempfile
from pathlib import Path

import numpy as np


def main() -> None:
    (checkout,) = sys.argv[1:]
    os.chdir(tempfile.mkdtemp())
    Path("data/shakespeare").mkdir(parents=True)
    for part in ("train", "val"):
        np.random.randint(0, 100, 100_000).astype(np.uint16).tofile(f"data/shakespeare/{part}.bin")
    sys.path.insert(0, checkout)
    sys.argv = ["train.py"]
    runpy.run_path(str(Path(checkout) / "train.py"), run_name="__main__")


if __name__ == "__main__":
    main()
