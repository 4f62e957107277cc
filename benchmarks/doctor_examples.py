"""The doctor on the set-ups of ``examples/``: runs each file and looks at what it trains.

cd benchmarks
python doctor_examples.py           some minutes; writes results/doctor_examples_cpu.jsonl
python doctor_examples.py peft_lora  some of them, printed; their lines alone are written anew
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from provenance import provenance
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowtide

EXAMPLES = Path(__file__).parents[1] / "examples"
RESULTS = Path(__file__).parent / "results" / "doctor_examples_cpu.jsonl"


def plain_loop(made: dict[str, Any]) -> lowtide.Diagnosis:
    return lowtide.diagnose(
        made["model"], made["batches"][0], lambda model, x: F.mse_loss(model.decoder(model.encoder(x)), x)
    )


def long_sequences(made: dict[str, Any]) -> lowtide.Diagnosis:
    return lowtide.diagnose(made["model"], made["batch"], made["loss_of"])


def classic_checkpoint(made: dict[str, Any]) -> lowtide.Diagnosis:
    def step(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda h, block: checkpoint(block, h, use_reentrant=False), blocks, x).square().mean()

    return lowtide.diagnose(made["blocks"], made["x"], step)


def accelerate_loop(made: dict[str, Any]) -> lowtide.Diagnosis:
    def step(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):  # as Accelerate's mixed_precision="bf16"
            logits = model(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())

    return lowtide.diagnose(made["model"], made["dataset"][:16], step)


def lightning_callback(made: dict[str, Any]) -> lowtide.Diagnosis:
    from lowtide.integrations.lightning_doctor import DoctorCallback

    callback = DoctorCallback()
    made["train"](callback)
    assert callback.found is not None
    return callback.found


def deepspeed_zero2(made: dict[str, Any]) -> lowtide.Diagnosis:
    deepspeed = made["deepspeed"]
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = made["Model"]()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=made["CONFIG"])
    try:
        return lowtide.diagnose(engine, torch.randn(made["ROWS"], made["WIDTH"], dtype=torch.bfloat16))
    finally:
        engine.destroy()
        torch.distributed.destroy_process_group()


def megatron_gpt(made: dict[str, Any]) -> lowtide.Diagnosis:
    torch.distributed.init_process_group("gloo")
    made["parallel_state"].initialize_model_parallel()
    made["random"].model_parallel_cuda_manual_seed(1)
    config = made["TransformerConfig"](
        num_layers=4, hidden_size=128, num_attention_heads=4, use_cpu_initialization=True
    )
    rows, length, words = made["ROWS"], made["LENGTH"], made["WORDS"]
    model = made["GPTModel"](config, made["get_gpt_layer_local_spec"](), vocab_size=words, max_sequence_length=length)
    positions = torch.arange(length).expand(rows, length)
    mask = torch.ones(1, 1, length, length).tril().logical_not()
    try:
        return lowtide.diagnose(
            model, torch.randint(0, words, (rows, length)),
            lambda model, ids: model(ids, positions, mask, labels=ids).mean(),
        )  # fmt: skip
    finally:
        made["parallel_state"].destroy_model_parallel()
        torch.distributed.destroy_process_group()


LOOKS: dict[str, Callable[[dict[str, Any]], lowtide.Diagnosis] | None] = {
    "plain_loop": plain_loop, "long_sequences": long_sequences, "classic_checkpoint": classic_checkpoint,
    "accelerate_loop": accelerate_loop, "lightning_callback": lightning_callback,
    "deepspeed_zero2": deepspeed_zero2, "megatron_gpt": megatron_gpt,
    "transformers_trainer": None, "peft_lora": None, "trl_sft": None, "trl_grpo": None,
}  # fmt: skip


def from_a_trainer(path: Path) -> lowtide.Diagnosis:
    """What the callback finds in the first trainer that the file makes: the plain one."""
    from transformers import Trainer

    from lowtide.integrations.transformers_doctor import DoctorCallback

    callback, make = DoctorCallback(), Trainer.__init__
    made = []

    def with_doctor(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if not made:
            self.add_callback(callback)
        made.append(self)

    with patch.object(Trainer, "__init__", with_doctor):
        runpy.run_path(str(path))
    assert callback.found is not None
    return callback.found


def main() -> int:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or list(LOOKS)
    lines = {line["example"]: line for line in map(json.loads, RESULTS.read_text().splitlines())}
    for name in wanted:
        look = LOOKS[name]
        path, start = EXAMPLES / f"{name}.py", time.process_time()
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            found = look(runpy.run_path(str(path))) if look else from_a_trainer(path)
        findings = {f.code: f"{f.severity}: {f.evidence}" for f in found}
        line = {"example": path.name, "findings": findings, "notes": list(found.notes)}
        print(json.dumps(line), file=sys.stderr, flush=True)
        cpu_s = round(time.process_time() - start, 1)
        lines[path.name] = {"benchmark": "doctor_examples_cpu", **line, "cpu_s": cpu_s, **provenance()}
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines.values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
