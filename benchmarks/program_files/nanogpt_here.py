"""nanoGPT's three files, from a clone on the path, where it is run; and tokens: nanogpt_here.py FOLDER"""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np

folder = Path(sys.argv[1])
for name in ("train", "model", "configurator"):
    shutil.copy(find_spec(name).origin, folder)
data = folder / "data" / "tokens"
data.mkdir()
for split in ("train", "val"):
    np.random.default_rng(0).integers(0, 50304, 20_000, dtype=np.uint16).tofile(data / f"{split}.bin")
