"""Case (b): a Llama-architecture decoder, trained from random weights on next tokens under bf16 autocast.

The architecture is transformers' own; the weights are random because no decoder's can be shipped with a package.
"""

from itertools import islice

import torch
from torch import nn

from lowtide.demo.case import Case
from lowtide.demo.extras import quiet_transformers
from lowtide.demo.text import subword_ids, token_batches

_SIZES = dict(hidden_size=512, num_hidden_layers=8, intermediate_size=1408, num_attention_heads=8)
_QUICK_SIZES = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=176, num_attention_heads=4)


def next_token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss, its forward pass under bf16 autocast."""
    with torch.autocast(batch["input_ids"].device.type, dtype=torch.bfloat16):
        return model(**batch).loss


def decoder_case(*, quick: bool = False) -> Case:
    """Build the model and cut the text into batches; ``quick`` is a toy of the same architecture, for tests.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    transformers = quiet_transformers()
    sizes = _QUICK_SIZES if quick else _SIZES
    vocabulary, length, short = (512, 64, 32) if quick else (4096, 512, 128)
    heads = sizes["num_attention_heads"] // 2
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=heads, vocab_size=vocabulary, use_cache=False)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    ids = subword_ids(vocabulary)
    return Case(
        name="Llama-architecture decoder, next token",
        facts="random weights, bf16 autocast, the loss computed inside the model",
        model=model,
        step=next_token_loss,
        batch=next(token_batches(ids, 2, length)),
        training=tuple(islice(token_batches(ids, 2, short), 12)),
        training_steps=4 if quick else 24,
        learning_rate=3e-4,
        training_budget="60%",
        budgets=("70%", "60%") if quick else ("60%", "45%"),
    )
