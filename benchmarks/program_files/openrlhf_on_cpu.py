"""OpenRLHF's SFT on a machine without an accelerator: where it asks CUDA for a device it is given the CPU.

    deepspeed --num_gpus 1 openrlhf_on_cpu.py --model.model_name_or_path ... --data.dataset ...

Nothing that computes is replaced: its strategy, its actor, DeepSpeed's engine, its loop are as they are.
"""

import runpy
import sys
import types
from importlib.machinery import ModuleSpec

import torch

# FlashAttention needs a GPU; what is imported of it is called for packed samples only.
_FLASH = {"": (), ".bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"), ".utils": (),
          ".utils.distributed": ("all_gather",)}  # fmt: skip
for part, functions in _FLASH.items():
    module = types.ModuleType("flash_attn" + part)
    module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
    vars(module).update(dict.fromkeys(functions), __path__=[])
    sys.modules[module.__name__] = module

from openrlhf.utils.deepspeed import deepspeed as strategy  # noqa: E402

for name in ("set_device", "empty_cache", "synchronize"):
    setattr(torch.cuda, name, lambda *_: None)
torch.cuda.current_device = lambda: "cpu"
_make_mesh = strategy.init_device_mesh
strategy.init_device_mesh = lambda _, *args, **kwargs: _make_mesh("cpu", *args, **kwargs)

if __name__ == "__main__":
    runpy.run_module("openrlhf.cli.train_sft", run_name="__main__")
