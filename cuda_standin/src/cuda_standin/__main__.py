"""``python -m cuda_standin enable | disable | build | slim | info``, run by the Python whose PyTorch is meant."""

import argparse
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

from cuda_standin import build, slim
from cuda_standin.settings import StandinError, check, gpu_names

_HOOK = "cuda_standin_autoload.pth"


def main(arguments: list[str]) -> int:
    verbs = {"enable": _enable, "disable": _disable, "build": _build, "slim": _slim, "info": _info}
    parser = argparse.ArgumentParser(prog="python -m cuda_standin", description=__doc__)
    parser.add_argument("verb", choices=verbs)
    verb = parser.parse_args(arguments).verb
    try:
        print(verbs[verb]())
    except (StandinError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _hook() -> Path:
    return Path(sysconfig.get_paths()["purelib"]) / _HOOK


def _enable() -> str:
    if sys.prefix == sys.base_prefix:
        raise StandinError("cuda_standin: enable it in a virtual environment, not for every program of this machine.")
    _hook().write_text("import cuda_standin.autoload\n")
    return f"Every process of {sys.prefix} that imports torch runs on the stand-in now."


def _disable() -> str:
    _hook().unlink(missing_ok=True)
    return f"{sys.prefix} does not load the stand-in any more."


def _torch() -> Path:
    os.environ["STANDIN_CUDA"] = "0"  # to find it, not to import it
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise StandinError(
            "cuda_standin: this environment has no torch. Bring one: pip install --no-deps torch==2.14.1"
        )
    return Path(spec.origin).parent


def _build() -> str:
    check()
    return str(build.libraries(_torch()))


def _slim() -> str:
    return f"{slim.slim(_torch()) >> 20} MiB of GPU code freed"


def _info() -> str:
    return f"PyTorch in {_torch()}; libraries in {build.libraries(_torch())}; GPUs: {', '.join(gpu_names())}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
