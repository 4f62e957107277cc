"""The checks that each PyTorch of the README's table passed, on the one that is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.thorough
def test_this_pytorch_runs_on_the_stand_in():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STANDIN_")}
    script = Path(__file__).with_name("check_version.py")
    done = subprocess.run([sys.executable, script], env=environment, text=True, capture_output=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "0 failed", done.stdout + done.stderr
    assert not [line for line in lines[1:-1] if not line.startswith(("ok ", "- "))], done.stdout
    assert {line.split()[1].rstrip(":") for line in lines if line.startswith("ok")} >= {
        "memory", "two_streams", "events", "model_in_float32", "model_in_bf16", "attention_flash_bfloat16",
        "attention_efficient_float32", "attention_math_float32", "dropout", "adamw_fused_True", "autocast", "graph",
        "expandable_segments", "device",
    }  # fmt: skip
