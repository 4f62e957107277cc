"""Atoms with energies and forces, as MACE reads them: python benchmarks/program_files/mace_data.py FOLDER"""

import sys
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.io import write

generator = np.random.default_rng(0)
frames = []
for _ in range(40):
    atoms = Atoms("OHHOHHOHH", positions=generator.normal(size=(9, 3)) * 2)
    atoms.info["REF_energy"] = float(generator.normal())
    atoms.arrays["REF_forces"] = generator.normal(size=(9, 3))
    frames.append(atoms)
write(Path(sys.argv[1]) / "data" / "atoms.xyz", frames, format="extxyz")
