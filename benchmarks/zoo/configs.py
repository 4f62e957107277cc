"""A small configuration for any architecture of transformers.

Every attribute of a known name gets a small number instead of its default, in nested configurations too. Lists with one
entry per layer keep each kind of entry. What an architecture needs beyond that is in ``PARTICULAR``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

VOCABULARY, HIDDEN, HEADS, LAYERS, IMAGE = 128, 32, 4, 2, 64

# Attributes by the value that they get, where a configuration has them as numbers.
_NAMES: tuple[tuple[int, str], ...] = (
    (
        HIDDEN,
        """
        hidden_size d_model n_embd dim embed_dim hidden_dim model_dim embedding_size emb_dim encoder_hidden_size
        decoder_hidden_size d_embed projection_dim attention_hidden_size encoder_embed_dim text_embed_dim embedding_dim
        lru_width conv_dim attention_hidden_dim cross_attention_hidden_size decoder_hidden_dim out_hidden_size
        text_hidden_size audio_hidden_size adapter_in_dim output_dim output_proj_dims patch_embed_hidden_size
        adapter_input_size base_channels qformer_hidden_size hidden_size_global cross_hidden_size adapter_out_dim
        projector_hidden_size moe_hidden_size downsample_hidden_size
    """,
    ),
    (
        HEADS,
        """
        num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_heads
        num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads attention_heads
        decoder_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts
        ffn_num_experts time_step_rank index_topk num_queries num_frames block_size num_labels
    """,
    ),
    (
        LAYERS,
        """
        num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers num_blocks depth encoder_num_hidden_layers decoder_num_hidden_layers speech_encoder_layers
        text_layers
    """,
    ),
    (
        2,
        """
        num_key_value_heads encoder_num_key_value_heads decoder_num_key_value_heads num_mem_blocks num_experts_per_tok
        moe_topk moe_top_k moe_k top_k num_experts_per_token mamba_expand linear_num_key_heads linear_num_value_heads
        index_n_heads eos_token_id tubelet_size type_vocab_size window_size
        mask_time_length mask_feature_length
    """,
    ),
    (
        2 * HIDDEN,
        """
        intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size inner_dim d_inner
        encoder_intermediate_size moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
        dense_intermediate_size moe_shared_expert_intermediate_size intermediate_size_mlp shared_intermediate_size
        dim_feedforward block_ff_dim max_position_embeddings n_positions n_ctx max_source_positions max_target_positions
    """,
    ),
    (
        VOCABULARY,
        """
        vocab_size input_vocab_size text_vocab_size decoder_vocab_size codebook_size vocab_size_per_layer_input
    """,
    ),
    (
        8,
        """
        head_dim attention_head_dim d_kv v_head_dim qk_nope_head_dim global_head_dim qk_rope_head_dim patch_size
        rotary_dim mamba_n_heads mamba_d_head mamba_num_heads mamba_head_dim chunk_size sliding_window attention_window
        linear_key_head_dim linear_value_head_dim index_head_dim hidden_size_per_layer_input context_size
        num_query_tokens
    """,
    ),
    (16, "q_lora_rank kv_lora_rank mamba_d_state state_size mamba_d_ssm ssm_state_size num_mel_bins"),
    (
        1,
        """
        n_group topk_group first_k_dense_replace moe_layer_start_index n_shared_experts mamba_n_groups num_random_blocks
        bos_token_id decoder_start_token_id
    """,
    ),
    (0, "mlp_only_layers num_nextn_predict_layers num_kv_shared_layers pad_token_id"),
    (IMAGE, "image_size"),
    (3, "num_channels"),
)
_LAYERS = set(_NAMES[2][1].split())
SMALL = {name: value for value, names in _NAMES for name in names.split()}
# Lists: one value for each entry, the length stays.
SMALL_EACH = {
    "depths": (1,), "hidden_sizes": (16, 16, 32, 32), "num_heads": (2,), "embed_dims": (16, 16, 32, 32),
    "encoder_hidden_sizes": (16,), "neck_hidden_sizes": (16,), "layers": (1,), "conv_dim": (16,),
    "num_attention_heads": (2,), "embed_dim": (16, 16, 32, 32), "num_channels": (16,),
}  # fmt: skip
TOKENS_FROM = 100  # special tokens of a model, where they would lie beyond the vocabulary

# What an architecture needs in addition, by ``model_type``; nested configurations by their own type or their name.
PARTICULAR: dict[str, dict[str, Any]] = {
    # Decoders: what follows from other numbers, or has none by default.
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"block_size": 2},
    "bigbird_pegasus": {"block_size": 2},
    "blt": {"encoder_hash_byte_group_vocab": 50, "use_cache": False, "encoder_config": {"cross_attn_k": 2}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0, "kv_n_heads": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_audio_encoder": {"feature_size": 16},
    "dots3_note_text": {"swa_num_attention_heads": HEADS, "swa_num_key_value_heads": HEADS, "swa_q_lora_rank": 16,
                        "swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
                        "num_key_value_heads": HEADS, "head_dim": 16},
    "dots3_note_vision_encoder": {"pyramid_num_routed": [-1, 4]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gemma4_text": {"global_head_dim": 8},
    "gemma4_unified_text": {"global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"axial_pos_embds": False, "attention_head_size": 8, "attn_layers": ["local", "lsh"],
                 "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 4, "hash_seed": 0},
    "xlstm": {"use_cache": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4,
              "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": HEADS},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
    # Encoders.
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 4, "pad_token_id": 1},
    "esmc": {"num_key_value_heads": HEADS, "vocab_size": VOCABULARY},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2, "num_blocks": 1,
                  "num_self_attention_heads": 2, "num_cross_attention_heads": 2},
    # Images.
    "beit": {"out_indices": [0, 1, 2, 3], "num_hidden_layers": 4},
    "bit": {"num_groups": 4, "embedding_size": 16},
    "data2vec-vision": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    "donut-swin": {"patch_size": 4},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16] * 4,
            "fusion_hidden_size": 16},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "hgnet_v2": {"hidden_sizes": [16, 16, 32, 32], "stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 16, 32],
                 "stage_mid_channels": [8] * 4, "stage_out_channels": [16, 16, 32, 32], "stage_num_blocks": [1] * 4,
                 "stage_numb_of_layers": [2] * 4},
    "imagegpt": {"n_embd": HIDDEN},
    "levit": {"hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "key_dim": [8, 8, 8],
              "image_size": 64, "patch_size": 16},
    "mobilevitv2": {"patch_size": 2},
    "shieldgemma2": {"yes_token_index": 5, "no_token_index": 6},
    "swin": {"patch_size": 4},
    "textnet": {"stem_out_channels": 16, "hidden_sizes": [16] * 5},
    # Images and text.
    "blip-2": {"image_token_index": 99},
    "chameleon": {"vocabulary_map": {"<image>": 99}},
    "deepseek_ocr2_sam_vision_model": {"output_channels": 16, "downsample_channels": [16, HIDDEN],
                                       "global_attn_indexes": [1]},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64, "global_head_dim": 8},
    "kosmos-2": {"latent_query_num": HEADS},
    "emu3": {"vocabulary_map": {"<image>": 99, "<|extra_200|>": 98}},
    "hunyuan_vl_text": {"head_dim": 8},
    "instructblip": {"image_token_index": 99},
    "instructblipvideo": {"video_token_index": 99},
    "neomme": {"head_dim": 16},
    "qwen2_5_omni_vision_encoder": {"window_size": 32},
    "qwen2_5_vl_vision": {"window_size": 32},
    "glm4v_moe_text": {"head_dim": 16},
    "glm5_next_text": {"index_kpool": 2, "qk_rope_head_dim": 0, "head_dim": 0, "linear_head_dim": 8,
                       "linear_num_heads": HEADS},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [0, 1, 0, 1],
                        "downsample_rate": "1/2", "image_grid_pinpoints": [[IMAGE, IMAGE]],
                        "vision_config": {"hidden_size": 64}, "qformer_config": {"intermediate_size": 64}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "muse_spark": {"out_hidden_size": 4 * HIDDEN},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "paddleocr_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
                          "head_dim": 8},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
                       "indexer_compress_ratio": 2},
    "sapiens2": {"head_config": {"upsample_out_channels": [16], "upsample_kernel_sizes": [4], "conv_out_channels": [16],
                                 "conv_kernel_sizes": [1], "use_pixel_shuffle": False}},
    "step3p5": {"sliding_window": 8},
    "tipsv2_dpt": {"neck_hidden_sizes": [16] * 4, "fusion_hidden_size": 16,
                   "backbone_config": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "apply_layernorm": True,
                                       "reshape_hidden_states": False}},
    "upernet": {"auxiliary_in_channels": HIDDEN,
                "backbone_config": {"out_features": ["stage1", "stage2", "stage3", "stage4"]}},
    # Speech.
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    "moonshine": {"encoder_num_key_value_heads": HEADS, "decoder_num_key_value_heads": HEADS},
    "canary": {"vocab_size": VOCABULARY},
    "dia": {"delay_pattern": [0, 1, 2], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
            "decoder_config": {"num_channels": 3, "cross_num_attention_heads": HEADS, "cross_head_dim": 8,
                               "cross_num_key_value_heads": HEADS, "num_key_value_heads": HEADS},
            "encoder_config": {"num_key_value_heads": HEADS}},
    "granite_speech5_encoder": {"num_key_value_heads": HEADS},
    "mimi": {"num_filters": 4, "num_residual_layers": 1, "codebook_size": 16, "codebook_dim": 8, "num_quantizers": 8,
             "vector_quantization_hidden_dimension": 8, "upsample_groups": HIDDEN, "num_key_value_heads": HEADS},
    "speech_to_text": {"conv_channels": 32, "input_feat_per_channel": 16},
    "vibevoice_acoustic_tokenizer": {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]},
    "wav2vec2-bert": {"vocab_size": VOCABULARY},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
}  # fmt: skip


# What draws its seeds from the system where it drops, so that no two plain steps are equal.
WITHOUT_DROPOUT: dict[str, dict[str, Any]] = {
    "reformer": {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0,
                 "lsh_attention_probs_dropout_prob": 0.0},
}  # fmt: skip


def small(config_class: Any, dropout: float | None) -> Any:
    """A configuration with small numbers, dropout rates replaced by ``dropout`` unless that is None."""
    return config_class(**overrides(config_class, dropout))


def overrides(config_class: Any, dropout: float | None) -> dict[str, Any]:
    """Arguments of a small configuration."""
    particular = PARTICULAR.get(getattr(config_class, "model_type", ""), {})
    try:
        default = config_class()
    except Exception:  # its own defaults are not allowed
        default = config_class(**particular)
    inside = dict(getattr(config_class, "sub_configs", None) or {})
    # What it computes follows from what it declares.
    accepted = {field.name for field in dataclasses.fields(config_class)} | {n for n in vars(default) if "token" in n}
    kinds = _kinds(default, accepted)
    layers = max([LAYERS, *map(len, kinds.values())])
    found: dict[str, Any] = {}
    special = TOKENS_FROM
    for name in sorted(accepted):
        value = _value(default, name)
        if name in inside or name.startswith("_") or isinstance(value, bool):
            continue
        if name in kinds:
            found[name] = [kinds[name][i % len(kinds[name])] for i in range(layers)]
        elif isinstance(value, int) and name in SMALL:
            found[name] = layers if kinds and name in _LAYERS else SMALL[name]
        elif isinstance(value, (list, tuple)) and name in SMALL_EACH and value:
            each = SMALL_EACH[name]
            found[name] = [each[i % len(each)] for i in range(len(value))]
        elif isinstance(value, int) and name.endswith(("_token_id", "_token_index")) and value >= VOCABULARY:
            found[name], special = special, special + 1
        elif dropout is not None and isinstance(value, float) and ("drop" in name) and "layerdrop" not in name:
            found[name] = dropout
    if "kv_lora_rank" in found:  # latent attention has as many of them as heads
        found["num_key_value_heads"] = HEADS
    rope = _value(default, "rope_parameters") or {}
    if "mrope_section" in {*rope, *getattr(config_class, "ignore_keys_at_rope_validation", ())}:
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, **rope, "mrope_section": [1, 1, 2]}
    for name in inside:
        value = _value(default, name)
        if value is not None and not isinstance(value, dict):
            found[name] = overrides(type(value), dropout)
            if "model_type" in vars(type(value)):
                found[name]["model_type"] = type(value).model_type
    found = _deep(found, particular)
    return found if dropout is not None else found | WITHOUT_DROPOUT.get(getattr(config_class, "model_type", ""), {})


def _deep(found: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """``found`` updated with ``more``, nested dicts too."""
    inside = {
        key: _deep(found[key], value)
        for key, value in more.items()
        if isinstance(value, dict) and isinstance(found.get(key), dict) and key != "rope_parameters"
    }
    return found | more | inside


def _kinds(default: Any, accepted: set[str]) -> dict[str, list[str]]:
    """For each list of names with one entry per layer, the distinct names in order."""
    found = {}
    for name in accepted:
        value = _value(default, name)
        words = isinstance(value, (list, tuple)) and len(value) > LAYERS and all(isinstance(v, str) for v in value)
        if words and name.endswith(("_types", "_type")):
            found[name] = list(dict.fromkeys(value))
    return found


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # one that may differ between layers
        return vars(config).get(name)
