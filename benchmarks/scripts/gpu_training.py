"""Trainings as people write them, for one GPU: prints what the GPU took, as one JSON line.

    python gpu_training.py "gpt2 medium"

``benchmarks/foreseen_gpu.py`` runs it twice: under ``lowtide pretend``, where there is no GPU, and on one.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from torch import nn
from torch.nn import functional as F

BF16 = torch.bfloat16
Loss = Callable[[], torch.Tensor]


def _ids(rows: int, tokens: int, words: int = 32000) -> torch.Tensor:
    return torch.randint(0, words, (rows, tokens))


def _llama(
    rows: int, tokens: int, *, layers: int, width: int, heads: int, kv: int, inner: int
) -> tuple[nn.Module, Loss]:
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=32000, max_position_embeddings=tokens, use_cache=False,
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config).to(BF16), _ids(rows, tokens)
    return model, lambda: model(input_ids=ids, labels=ids).loss


def llama_1b(rows: int, tokens: int) -> tuple[nn.Module, Loss]:
    return _llama(rows, tokens, layers=16, width=2048, heads=32, kv=8, inner=8192)


def llama_1b_checkpointed() -> tuple[nn.Module, Loss]:
    model, loss = llama_1b(16, 4096)
    model.gradient_checkpointing_enable()
    return model, loss


def llama_7b_lora() -> tuple[nn.Module, Loss]:
    import peft

    model, _ = _llama(2, 2048, layers=32, width=4096, heads=32, kv=32, inner=11008)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=targets)
    )
    ids = _ids(2, 2048)
    return adapted, lambda: adapted(input_ids=ids, labels=ids).loss


def gpt2_medium() -> tuple[nn.Module, Loss]:
    config = transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False)
    model, ids = transformers.GPT2LMHeadModel(config), _ids(8, 1024)
    return model, lambda: model(input_ids=ids, labels=ids).loss


def bert_large() -> tuple[nn.Module, Loss]:
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        attn_implementation="eager",
    )  # fmt: skip
    model, ids = transformers.BertForSequenceClassification(config), _ids(16, 512, 30522)
    labels = torch.randint(0, 2, (16,))
    return model, lambda: model(input_ids=ids, labels=labels).loss


def vit_large() -> tuple[nn.Module, Loss]:
    config = transformers.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1000
    )
    model, images = transformers.ViTForImageClassification(config), torch.randn(64, 3, 224, 224)
    labels = torch.randint(0, 1000, (64,))
    return model, lambda: model(pixel_values=images, labels=labels).loss


def resnet_50() -> tuple[nn.Module, Loss]:
    import torchvision

    model = torchvision.models.resnet50().to(memory_format=torch.channels_last)
    images = torch.randn(256, 3, 224, 224).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (256,))
    return model, lambda: F.cross_entropy(model(images), labels)


def whisper_small() -> tuple[nn.Module, Loss]:
    config = transformers.WhisperConfig(
        d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12, decoder_attention_heads=12,
        encoder_ffn_dim=3072, decoder_ffn_dim=3072, use_cache=False,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    sound, labels = torch.randn(8, 80, 3000), _ids(8, 256)
    return model, lambda: model(input_features=sound, labels=labels).loss


def small_decoder() -> tuple[nn.Module, Loss]:
    model, loss = _llama(4, 256, layers=8, width=512, heads=8, kv=8, inner=1536)
    return model, loss


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# Model and loss, optimizer, autocast's dtype or None, whether torch.compile.
CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Loss]], Callable, torch.dtype | None, bool]] = {
    "llama 1b": (lambda: llama_1b(4, 4096), _fused, None, False),
    "llama 1b, checkpointed": (llama_1b_checkpointed, _adamw, None, False),
    "llama 1b, compiled": (lambda: llama_1b(4, 4096), _fused, None, True),
    "llama 7b, LoRA": (llama_7b_lora, _adamw, None, False),
    "gpt2 medium": (gpt2_medium, _adamw, BF16, False),
    "bert large, float32": (bert_large, _adamw, None, False),
    "vit large": (vit_large, _adamw, BF16, False),
    "resnet 50": (resnet_50, _sgd, torch.float16, False),
    "whisper small": (whisper_small, _adamw, BF16, False),
    "small decoder": (small_decoder, _adamw, None, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--alone", help="a file that is locked while the GPU is used: one process at a time is timed")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    with _locked(args.alone):
        build, optimizer_of, dtype, is_compiled = CASES[args.case]
        with torch.device("cuda"):
            model, loss_of = build()
        model.train()
        if is_compiled:
            model.compile()
        optimizer = optimizer_of([p for p in model.parameters() if p.requires_grad])
        scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
        print(json.dumps({"case": args.case} | trained(loss_of, optimizer, scaler, dtype, args.steps)), flush=True)


def trained(loss_of: Loss, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, dtype, steps: int) -> dict:
    """Peaks of all that ran, and the median step of the second half, by events; the host's time of it besides."""
    events, host_ms = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)], []
    events[0].record()
    for step in range(steps):
        began = time.perf_counter()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = loss_of()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        events[step + 1].record()
        host_ms.append((time.perf_counter() - began) * 1e3)
    torch.cuda.synchronize()
    half = range(steps // 2, steps)
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "step_ms": statistics.median(events[i].elapsed_time(events[i + 1]) for i in half),
        "host_ms": statistics.median(host_ms[i] for i in half),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@contextlib.contextmanager
def _locked(path: str | None):
    if path is None:
        yield
        return
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main()
