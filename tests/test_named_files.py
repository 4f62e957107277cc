"""Docstrings and comments name files that exist: who looks one up is not sent to a file that was renamed or removed."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READ = sorted(p for part in ("src", "tests", "benchmarks", "cuda_standin", ".ci") for p in (ROOT / part).rglob("*.py"))
FOLDERS = (
    "src", "tests", "benchmarks", "docs", "examples", "tools", "changelog.d", "cuda_standin", ".ci", ".github",
)  # fmt: skip
THERE = {
    path.relative_to(ROOT).as_posix()
    for paths in (ROOT.iterdir(), *((ROOT / part).rglob("*") for part in FOLDERS))
    for path in paths
}
# Files of other projects, each named beside its project, and what a user's own file may be called.
FOREIGN = {
    "ATen/TensorIterator.cpp",
    "ATen/autocast_mode.h",
    "ATen/cuda/CublasHandlePool.cpp",
    "ATen/native/transformers/cuda/flash_attn/flash_api.cpp",
    "ATen/native/transformers/cuda/sdp_utils.cpp",
    "Loss.cpp",
    "ReduceOps.cpp",
    "SCRIPT.py",
    "ScanKernels.cpp",
    "_activation_checkpointing/knapsack.py",
    "bitsandbytes/autograd/_functions.py",
    "bitsandbytes/nn/modules.py",
    "c10/cuda/CUDACachingAllocator.cpp",
    "colossalai/shardformer/shard/grad_ckpt_config.py",
    "file.py",
    "mcore_adapter/training_args.py",
    "mem_eff_attention/kernel_backward.h",
    "model_config.py",
    "native/transformers/attention.cpp",
    "roll/models/model_providers.py",
    "runtime/activation_checkpointing/checkpointing.py",
    "runtime/config.py",
    "torch/_functorch/partitioners.py",
    "torch/csrc/autograd/input_buffer.cpp",
    "torch/cuda/__init__.py",
    "torchtitan/distributed/activation_checkpoint.py",
    "train.py",
    "trainer.py",
}
_NAME = re.compile(r"(?<![\w./-])((?:[\w.-]+/)*[\w-]+\.(?:py|pyi|md|jsonl|toml|cpp|h))(?![\w/])")


def prose(source: str) -> Iterator[str]:
    """The docstrings and comments of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node, clean=False) or ""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from (token.string for token in tokens if token.type == tokenize.COMMENT)


def missing(source: str) -> set[str]:
    """Files that prose in ``source`` names, and that are not here."""
    gone = {name for name in _NAME.findall(source) if not is_there(name)}
    return gone & {name for text in prose(source) for name in _NAME.findall(text)} if gone else set()


@cache
def is_there(name: str) -> bool:
    """Whether some file is called that, its folders as far as they are named."""
    return any(path == name or path.endswith(f"/{name}") for path in THERE)


@pytest.fixture(scope="module")
def missing_in() -> dict[str, set[str]]:
    """By module, what its prose names and is not here."""
    return {path.relative_to(ROOT).as_posix(): missing(path.read_text()) for path in READ}


def test_every_file_that_prose_in_code_names_exists(missing_in):
    assert [f"{path} names {name}" for path, names in missing_in.items() for name in sorted(names - FOREIGN)] == []


def test_a_file_that_is_gone_is_seen_wherever_it_is_named():
    docstring = '"""As in ``gone.py``."""\nPATH = "of/a/string.py"  # see tape/tape.py\n'
    source = f'{docstring}def f():\n    """Also lost/tape.py, and `more.md`."""\n'

    assert missing(source) == {"gone.py", "lost/tape.py", "more.md"}


def test_each_foreign_name_is_still_named(missing_in):
    assert set.union(*missing_in.values()) >= FOREIGN
