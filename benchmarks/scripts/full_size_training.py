"""A training loop of one model at full size, as people write it: ``lowtide pretend`` runs it (benchmarks/full_size.py).

python full_size_training.py llama-8b [--checkpointing] [--autocast] [--fsdp]
"""

import argparse
import os

import torch
import transformers


def llama(**sizes):
    config = transformers.LlamaConfig(
        num_attention_heads=sizes.pop("heads"), num_key_value_heads=8, vocab_size=128256, use_cache=False, **sizes
    )
    return transformers.LlamaForCausalLM, config


# model: class and configuration, sequences, tokens of each (0: images of 224)
MODELS = {
    "llama-1b": (*llama(hidden_size=2048, num_hidden_layers=16, heads=32, intermediate_size=8192,
                        tie_word_embeddings=True), 4, 2048),
    "llama-8b": (*llama(hidden_size=4096, num_hidden_layers=32, heads=32, intermediate_size=14336), 1, 4096),
    "llama-70b": (*llama(hidden_size=8192, num_hidden_layers=80, heads=64, intermediate_size=28672), 1, 8192),
    "qwen-7b": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, vocab_size=152064,
        intermediate_size=18944, use_cache=False), 1, 4096),
    "mixtral-1.2b": (transformers.MixtralForCausalLM, transformers.MixtralConfig(
        hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=8, vocab_size=32000,
        intermediate_size=3584, num_local_experts=8, num_experts_per_tok=2, use_cache=False), 4, 2048),
    "vit-large": (transformers.ViTForImageClassification, transformers.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        num_labels=1000), 64, 0),
}  # fmt: skip


def sharded(model):
    """FSDP2, a unit for each layer: float32 shards, computed in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model.to_empty(device="cuda")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--fsdp", action="store_true")
    given = parser.parse_args()
    kind, config, sequences, tokens = MODELS[given.model]
    if given.fsdp:
        torch.distributed.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        with torch.device("meta"):
            model = kind(config)
        model = sharded(model)
    else:
        with torch.device("cuda"):
            torch.set_default_dtype(torch.float32 if given.autocast else torch.bfloat16)
            model = kind(config)
            torch.set_default_dtype(torch.float32)
    model.train()
    if given.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    while True:
        if tokens:
            ids = torch.randint(0, 1000, (sequences, tokens), device="cuda")
            batch = {"input_ids": ids, "labels": ids}
        else:
            images = torch.randn(sequences, 3, 224, 224, device="cuda", dtype=next(model.parameters()).dtype)
            batch = {"pixel_values": images, "labels": torch.zeros(sequences, dtype=torch.long, device="cuda")}
        with torch.autocast("cuda", torch.bfloat16, enabled=given.autocast):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
