"""Train on longer sequences: no logits, and MLPs over parts of the sequence.

    python examples/long_sequences.py

The least memory in which a small Llama-shaped model trains on 256 tokens: with a plan alone, with the loss in chunks,
and with tiled MLPs as well.
"""

import torch
import transformers

import lowtide

torch.manual_seed(0)
config = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=2048, use_cache=False,
)  # fmt: skip
model = transformers.LlamaForCausalLM(config).train()
ids = torch.randint(0, 2048, (1, 256))
batch = {"input_ids": ids, "labels": ids}


def loss_of(model, batch):
    return model(**batch).loss


least_mib = []
for name, options in {
    "a plan alone": {},
    "chunked loss": {"chunk_loss": True},
    "chunked loss and tiled MLPs": {"chunk_loss": True, "tile_mlp": 2},
}.items():
    try:
        lowtide.fit(model, batch, budget="1MiB", step=loss_of, **options)
    except lowtide.BudgetInfeasibleError as error:
        least_mib.append(error.least_bytes / 2**20)
        print(f"{name:28} trains in {least_mib[-1]:4.1f} MiB")

print(f"peak {least_mib[0]:.1f} MiB -> {least_mib[-1]:.1f} MiB, the least in which the model trains")
