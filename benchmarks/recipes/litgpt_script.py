"""A fine-tuning script of LitGPT, in a checkout of its repository, on tokens of our own.

    python litgpt_script.py CHECKOUT SCRIPT MODEL PRECISION QUANTIZE ROWS TOKENS [--norm-before-606]

With ``--norm-before-606`` RMSNorm is that of October 2023, which does not compute in float32.

The script is as published but for the constants at its head, which it tells its readers to change: rows of a
microbatch, and lengths of the evaluation before training. Two microbatches make a step; the published 128 take the same
memory. The longest sample, of TOKENS, comes first, as the script has it; the others are of 100. The checkpoint's values
and the tokenizer are not there.
"""

import inspect
import os
import re
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

OTHERS = 100
PRESENT = ("lightning", "torch>", "torch=", "bitsandbytes")
ABSENT = ("transformers",)


def sample(tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 1000, (tokens,))
    return {"input_ids": ids, "labels": ids.clone(), "input_ids_no_response": ids}


class Tokenizer:
    bos_id, eos_id = 1, 2

    def __init__(self, *_: object) -> None: ...

    def encode(self, text: str, device: object = None, **_: object) -> torch.Tensor:
        return torch.randint(1, 1000, (40,), dtype=torch.int32, device=device)

    def decode(self, ids: torch.Tensor) -> str:
        return f"{len(ids)} tokens"


def norm_before_606(self: Any, x: torch.Tensor) -> torch.Tensor:
    mean = torch.mean(x * x, dim=self.dim, keepdim=True)
    return self.weight * (x * torch.rsqrt(mean + self.eps))


def with_constants(source: str, **constants: object) -> str:
    for name, value in constants.items():
        source, found = re.subn(rf"^{name} = .*$", f"{name} = {value}", source, flags=re.MULTILINE)
        assert found, name
    return source


def main() -> None:
    checkout, name, model, precision, quantize, rows, tokens, *more = sys.argv[1:]
    sys.path.insert(0, checkout)
    made = Path(tempfile.mkdtemp())
    checkpoint, data = made / model, made / "data"
    checkpoint.mkdir()
    data.mkdir()
    torch.save([sample(int(tokens)), *(sample(OTHERS) for _ in range(31))], data / "train.pt")
    torch.save([sample(OTHERS) for _ in range(8)], data / "test.pt")

    from lightning_utilities.core.imports import RequirementCache

    # A package that is used from its sources, or without the nvidia packages that it asks for, counts as not installed;
    # transformers is here, and is not that of the time.
    asked = RequirementCache.__bool__
    RequirementCache.__bool__ = lambda self: (
        self.requirement.startswith(PRESENT) or (not self.requirement.startswith(ABSENT) and asked(self))
    )
    import lit_gpt.rmsnorm
    import lit_gpt.tokenizer
    import lit_gpt.utils

    if more == ["--norm-before-606"]:
        lit_gpt.rmsnorm.RMSNorm.forward = norm_before_606
    lit_gpt.tokenizer.Tokenizer = Tokenizer
    lit_gpt.utils.check_valid_checkpoint_dir = lambda *_: None
    lit_gpt.utils.load_checkpoint = lambda *_, **__: None
    lit_gpt.utils.lazy_load = lambda *_: {}

    file = Path(checkout) / "finetune" / name
    source = with_constants(file.read_text(), micro_batch_size=rows, batch_size=2 * int(rows), eval_iters=2)
    module = types.ModuleType("finetune_script")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    exec(compile(source, str(file), "exec"), vars(module))
    # Without a checkpoint nothing is loaded into the model.
    load = torch.nn.Module.load_state_dict
    torch.nn.Module.load_state_dict = lambda self, state, *a, **k: None if not state else load(self, state, *a, **k)
    torch.set_float32_matmul_precision("high")
    module.generate = lambda model, ids, **_: ids  # nothing is drawn from probabilities without values
    options = {"quantize": None if quantize == "none" else quantize}
    if "quantize" not in inspect.signature(module.setup).parameters:
        options = {}
    os.chdir(made)
    module.setup(data_dir=data, checkpoint_dir=checkpoint, out_dir=made / "out", precision=precision, **options)


if __name__ == "__main__":
    main()
