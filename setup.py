"""What pyproject.toml cannot say: a wheel that has lowtide's C++ built, for machines without a compiler.

    LOWTIDE_BUILT_FOR=/path/to/python:/path/to/other/python python -m build --wheel --no-isolation

The wheel has it for the PyTorch of each of these interpreters, and is of this platform. With another PyTorch it is as
any other wheel of lowtide, which builds its C++ on first use. The interpreters need what lowtide needs.
"""

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCE = Path(__file__).parent / "src"
PYTHONS = [name for name in os.environ.get("LOWTIDE_BUILT_FOR", "").split(os.pathsep) if name]
BUILD = """
import sys
from pathlib import Path
from lowtide.device import allocation_counter, planned_ops

for library in (allocation_counter.NATIVE, planned_ops.NATIVE):
    print(library.build(into=Path(sys.argv[1])))
"""


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        into = Path(self.build_lib, "lowtide", "device", "built").absolute()
        shutil.rmtree(into, ignore_errors=True)  # of an earlier wheel
        for python in PYTHONS:
            path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
            subprocess.run([python, "-c", BUILD, into], check=True, env=os.environ | {"PYTHONPATH": path})


class BdistWheel(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not PYTHONS

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if PYTHONS else (python, abi, platform)  # no Python in that C++


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
