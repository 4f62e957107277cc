"""What the scripts beside it are asked for, and how they leave what they trained."""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, required=True)
parser.add_argument("--steps", type=int, default=240)
parser.add_argument("--checkpointing", action="store_true", help="the library's own")
args, _ = parser.parse_known_args()


def show(loss) -> None:
    print({"loss": float(loss)}, flush=True)


@contextmanager
def timed() -> Iterator[None]:
    began = time.perf_counter()
    yield
    print({"train_runtime": time.perf_counter() - began}, flush=True)


def keep(module) -> None:
    """Write weights and buffers."""
    from safetensors.torch import save_file

    args.output.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: v.detach().contiguous().clone() for k, v in module.state_dict().items()}, args.output / "model.safetensors"
    )
