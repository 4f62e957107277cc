"""nanoGPT's three files, from a clone on the path, where it is run; and 65 kinds of letters: nanogpt_here.py FOLDER"""

import pickle
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np

folder = Path(sys.argv[1])
for name in ("train", "model", "configurator"):
    shutil.copy(find_spec(name).origin, folder)
data = folder / "data" / "letters"
data.mkdir()
for split in ("train", "val"):
    np.random.default_rng(0).integers(0, 65, 20_000, dtype=np.uint16).tofile(data / f"{split}.bin")
(data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))
