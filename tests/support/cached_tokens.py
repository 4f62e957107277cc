"""Tiny models of many architectures, and the bytes that their caches really take."""

import torch
import transformers as t

COMMON = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=64)
KV = dict(COMMON, num_key_value_heads=2, num_hidden_layers=3)
CONFIGS = {
    "llama": lambda: t.LlamaConfig(**KV),
    "qwen3": lambda: t.Qwen3Config(**KV, head_dim=16),
    "mistral": lambda: t.MistralConfig(**KV, sliding_window=6),
    "mixtral": lambda: t.MixtralConfig(**KV, num_local_experts=2),
    "gemma2": lambda: t.Gemma2Config(**KV, head_dim=8, sliding_window=6),
    "gemma3": lambda: t.Gemma3TextConfig(**{**KV, "num_hidden_layers": 7}, head_dim=8, sliding_window=5),
    "phi3": lambda: t.Phi3Config(**KV, pad_token_id=0),
    "gpt2": lambda: t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64),
    "gpt_neox": lambda: t.GPTNeoXConfig(**COMMON, num_hidden_layers=2),
    "falcon": lambda: t.FalconConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, vocab_size=64, multi_query=True
    ),
    "deepseek_v3": lambda: t.DeepseekV3Config(
        **{**KV, "num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=8,
        first_k_dense_replace=1,
    ),
    "mamba": lambda: t.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=8),
    "mamba2": lambda: t.Mamba2Config(
        hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=8, num_heads=8, head_dim=8, n_groups=2
    ),
    "qwen3_next": lambda: t.Qwen3NextConfig(
        **{**KV, "num_hidden_layers": 4}, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "jamba": lambda: t.JambaConfig(
        **{**KV, "num_hidden_layers": 4}, num_experts=2, mamba_d_state=8, mamba_dt_rank=4, attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False,
    ),
    "lfm2": lambda: t.Lfm2Config(**KV, layer_types=["conv", "full_attention", "conv"]),
    "falcon_h1": lambda: t.FalconH1Config(
        **KV, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8
    ),
    "t5": lambda: t.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0
    ),
    "whisper": lambda: t.WhisperConfig(
        d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=64, num_mel_bins=8, max_source_positions=20,
        decoder_start_token_id=0, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    ),
}  # fmt: skip


def filled_cache(config, batch_size: int, length: int, dtype: torch.dtype):
    """The cache of a model of ``config`` that has read ``length`` tokens, the last of them alone."""
    torch.manual_seed(0)
    if config.is_encoder_decoder:
        maker = t.AutoModelForSpeechSeq2Seq if config.model_type == "whisper" else t.AutoModelForSeq2SeqLM
    else:
        maker = t.AutoModelForCausalLM
    model = maker.from_config(config).eval().to(dtype)
    ids = torch.randint(0, config.vocab_size, (batch_size, length))
    with torch.no_grad():
        if config.model_type == "whisper":
            sound = {
                "input_features": torch.rand(batch_size, config.num_mel_bins, 2 * config.max_source_positions).to(dtype)
            }
            return model(**sound, decoder_input_ids=ids, use_cache=True).past_key_values
        if config.is_encoder_decoder:
            return model(input_ids=ids, decoder_input_ids=ids, use_cache=True).past_key_values
        cache = t.DynamicCache(config=config)
        name = "cache_params" if config.model_type.startswith("mamba") else "past_key_values"
        model(ids[:, :-1], **{name: cache}, use_cache=True)
        model(ids[:, -1:], **{name: cache}, use_cache=True)
        return cache


def tensors_of(cache) -> list[torch.Tensor]:
    """Those that hold cached state."""
    if isinstance(cache, t.EncoderDecoderCache):
        return tensors_of(cache.self_attention_cache) + tensors_of(cache.cross_attention_cache)
    found = []
    for layer in cache.layers:
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            held = getattr(layer, name, None)
            for x in held.values() if isinstance(held, dict) else held if isinstance(held, list) else [held]:
                if isinstance(x, torch.Tensor):
                    found.append(x)
    return found


def cache_bytes(cache) -> int:
    """Bytes of the elements; a window that is a view of more counts what it shows."""
    return sum(x.nbytes for x in tensors_of(cache))
