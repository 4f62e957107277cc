"""Megatron-Core on a machine without CUDA.

As shipped, its GPT model imports there and fails when it is built or called: it asks CUDA for the current device and
for the state of its random generator, also where everything is on the CPU. ``use_megatron`` replaces just these:

    torch.cuda.current_device               the CPU, where Megatron puts its global buffer and its masks
    torch.cuda.get_rng_state, manual_seed   those of the CPU's generator
    tensor_parallel.random._get_cuda_rng_state, _set_cuda_rng_state
                                            the same: they save and restore the states of Megatron's own generators,
                                            under which it draws dropout and initial weights

Nothing that computes is replaced. Pipeline schedules, Megatron's optimizers and its DDP need CUDA all the same; so the
loop is a plain one with an optimizer of torch's. ``selective`` recomputation of ``layernorm`` needs TransformerEngine
(0.16.1 fails with a NameError without it), that of ``mlp`` recurses without end.
"""

from __future__ import annotations

from typing import Any

import torch


def use_megatron() -> None:
    """Put the replacements in place, and one rank that is all of Megatron's groups. A process group has to be there."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def seed(number: int) -> None:
    """Both of torch's generator and of those that Megatron keeps for model parallel ranks."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(number)
    torch.manual_seed(number)


def gpt(*, layers: int = 4, width: int = 64, words: int = 128, longest: int = 64, **settings: Any) -> torch.nn.Module:
    """A GPT of Megatron's own layers, without TransformerEngine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    seed(1)
    config = TransformerConfig(
        num_layers=layers, hidden_size=width, num_attention_heads=4, use_cpu_initialization=True, **settings
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=words, max_sequence_length=longest)
