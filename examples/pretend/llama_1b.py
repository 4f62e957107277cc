"""A loop as people write it: Llama 1B, four sequences of 2,048 tokens, AdamW. It needs a GPU, or one that is not there:

lowtide pretend --device h100 -- python examples/pretend/llama_1b.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, tie_word_embeddings=True, use_cache=False,
)  # fmt: skip
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(1000):
    tokens = torch.randint(0, config.vocab_size, (4, 2048)).cuda()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}", flush=True)
