"""Every architecture of transformers that shrinks: a few thousand random weights, and a batch with a loss.

A configuration class is made with small numbers in place of its defaults, wherever it has an attribute of a known
name; configurations inside it likewise. What cannot be built that way is told from what cannot be fitted: the first
is about this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCABULARY, HIDDEN, HEADS, LAYERS, IMAGE, TOKENS, ROWS = 128, 32, 4, 2, 64, 12, 2

# Attributes by the value that they get, where a configuration has them as numbers.
_NAMES: tuple[tuple[int, str], ...] = (
    (
        HIDDEN,
        """
        hidden_size d_model n_embd dim embed_dim hidden_dim model_dim embedding_size emb_dim encoder_hidden_size
        decoder_hidden_size d_embed projection_dim attention_hidden_size encoder_embed_dim text_embed_dim embedding_dim
        lru_width conv_dim attention_hidden_dim cross_attention_hidden_size decoder_hidden_dim
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
        linear_key_head_dim linear_value_head_dim index_head_dim hidden_size_per_layer_input
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
SMALL = {name: value for value, names in _NAMES for name in names.split()}
# Lists: one value for each entry, the length stays.
SMALL_EACH = {
    "depths": (1,), "hidden_sizes": (16, 16, 32, 32), "num_heads": (2,), "embed_dims": (16, 16, 32, 32),
    "encoder_hidden_sizes": (16,), "neck_hidden_sizes": (16,), "layers": (1,), "conv_dim": (16,),
    "num_attention_heads": (2,), "embed_dim": (16, 16, 32, 32), "num_channels": (16,),
}  # fmt: skip
_TOKENS_FROM = 100  # special tokens of a model, where they would lie beyond the vocabulary


class CannotBuild(Exception):
    """This file knows no small configuration or no batch for the architecture."""


@dataclass(frozen=True)
class Specimen:
    """A model, its batch (keyword arguments, labels among them), and the class's name."""

    model: nn.Module
    batch: dict[str, torch.Tensor]
    name: str


def tasks() -> dict[str, tuple[str, Callable[[Any, Any], dict[str, torch.Tensor]]]]:
    """Task -> transformers' mapping of model types to classes, and what makes a batch."""
    return {
        "causal language": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", text_batch),
        "sequence to sequence": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", text_batch),
        "masked language": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", text_batch),
        "image classification": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", image_batch),
        "semantic segmentation": ("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES", segmentation_batch),
        "video classification": ("MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES", video_batch),
        "speech recognition (CTC)": ("MODEL_FOR_CTC_MAPPING_NAMES", waveform_batch),
        "speech to text": ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", speech_batch),
        "audio classification": ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", audio_batch),
        "image and text": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", image_text_batch),
    }


def specimens() -> Iterator[tuple[str, str]]:
    """Task and model type of all there is to try; each class once, under the first task that lists it."""
    from transformers.models.auto import modeling_auto

    seen: set[str] = set()
    for task, (mapping, _) in tasks().items():
        types_of: dict[str, list[str]] = {}
        for model_type, classes in getattr(modeling_auto, mapping).items():
            types_of.setdefault(classes if isinstance(classes, str) else classes[0], []).append(model_type)
        for name, types in types_of.items():
            if name not in seen:
                seen.add(name)
                own = [t for t in types if name.lower().startswith(t.replace("-", "").replace("_", ""))]
                yield task, (own or types)[0]


def build(task: str, model_type: str, *, dropout: float | None = None) -> Specimen:
    """The architecture, small and with the same weights each time.

    Args:
        dropout: In place of every dropout rate of the configuration; None leaves them.

    Raises:
        CannotBuild: no small configuration, or no batch, is known.
    """
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    mapping, make_batch = tasks()[task]
    classes = getattr(modeling_auto, mapping)[model_type]
    name = classes if isinstance(classes, str) else classes[0]
    try:
        model_class = getattr(transformers, name)
        config = small(getattr(model_class, "config_class", None) or CONFIG_MAPPING[model_type], dropout)
        torch.manual_seed(0)
        if task in ("sequence to sequence", "speech to text") and not getattr(config, "decoder_start_token_id", None):
            config.decoder_start_token_id = 1
        count = _weights(model_class, config)
        if count > 30_000_000:
            raise CannotBuild(f"{count / 1e6:.0f} million weights are left of it")
        model = model_class(config).float().train()
        batch = make_batch(config, model)
    except CannotBuild:
        raise
    except Exception as error:
        raise CannotBuild(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    return Specimen(model, batch, name)


def _weights(model_class: Any, config: Any) -> int:
    """How many, without making them; 0 for what looks at numbers when it is made."""
    state = torch.get_rng_state()
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in model_class(config).parameters())
    except Exception:
        return 0
    finally:
        torch.set_rng_state(state)


def small(config_class: Any, dropout: float | None) -> Any:
    """A configuration with small numbers."""
    return config_class(**_overrides(config_class, dropout))


def _overrides(config_class: Any, dropout: float | None) -> dict[str, Any]:
    default = config_class()
    inside = dict(getattr(config_class, "sub_configs", None) or {})
    accepted = set(inspect.signature(config_class.__init__).parameters) | set(vars(default))
    found: dict[str, Any] = {}
    special = _TOKENS_FROM
    for name in sorted(accepted):
        value = getattr(default, name, None)
        if name in inside or name.startswith("_"):
            continue
        if isinstance(value, bool):
            continue
        if isinstance(value, int) and name in SMALL:
            found[name] = SMALL[name]
        elif isinstance(value, (list, tuple)) and name in SMALL_EACH and value:
            each = SMALL_EACH[name]
            found[name] = [each[i % len(each)] for i in range(len(value))]
        elif isinstance(value, int) and name.endswith(("_token_id", "_token_index")) and value >= VOCABULARY:
            found[name], special = special, special + 1
        elif dropout is not None and isinstance(value, float) and ("drop" in name) and "layerdrop" not in name:
            found[name] = dropout
    if "kv_lora_rank" in found:  # latent attention has as many of them as heads
        found["num_key_value_heads"] = HEADS
    rope = getattr(default, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:
        found["rope_parameters"] = {**rope, "mrope_section": [1, 1, 2]}
    for name in inside:
        value = getattr(default, name, None)
        if value is not None:
            found[name] = _overrides(type(value), dropout)
            if "model_type" in vars(type(value)):
                found[name]["model_type"] = type(value).model_type
    if inside:  # these would override what is inside
        found = {k: v for k, v in found.items() if k in inside or "token" in k}
    return found


def _vocabulary(config: Any) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(min(getattr(text, "vocab_size", None) or VOCABULARY, _TOKENS_FROM))


def _ids(config: Any, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, _vocabulary(config), (ROWS, tokens))


def text_batch(config: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    ids = _ids(config)
    return {"input_ids": ids, "labels": ids.clone()}


def _pixels(config: Any) -> torch.Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", IMAGE) or IMAGE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(vision, "num_channels", 3)
    return torch.randn(ROWS, channels if isinstance(channels, int) else 3, height, width)


def image_batch(config: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    return {"pixel_values": _pixels(config), "labels": torch.randint(0, config.num_labels, (ROWS,))}


def segmentation_batch(config: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    pixels = _pixels(config)
    return {"pixel_values": pixels, "labels": torch.randint(0, config.num_labels, (ROWS, *pixels.shape[-2:]))}


def video_batch(config: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", 4)
    pixels = torch.stack([_pixels(config) for _ in range(frames)], dim=1)
    name = "pixel_values_videos" if "pixel_values_videos" in inspect.signature(model.forward).parameters else None
    return {name or "pixel_values": pixels, "labels": torch.randint(0, config.num_labels, (ROWS,))}


def _speech_inputs(config: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    accepted = inspect.signature(model.forward).parameters
    if "input_features" in accepted:
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_projection_input_dim", 16)
        frames = 2 * getattr(config, "max_source_positions", 32)
        if "Whisper" in type(model).__name__:
            return {"input_features": torch.randn(ROWS, bins, frames)}
        return {"input_features": torch.randn(ROWS, frames, bins)}
    return {"input_values": torch.randn(ROWS, 2000)}


def waveform_batch(config: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    return {**_speech_inputs(config, model), "labels": torch.randint(3, 20, (ROWS, 2))}


def speech_batch(config: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    return {**_speech_inputs(config, model), "labels": _ids(config, 6)}


def audio_batch(config: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    return {**_speech_inputs(config, model), "labels": torch.randint(0, config.num_labels, (ROWS,))}


def image_text_batch(config: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    """Text alone where the place of image tokens is not known."""
    batch = text_batch(config, model)
    token = getattr(config, "image_token_id", None)
    vision = getattr(config, "vision_config", None)
    size, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    if token is None or not isinstance(size, int) or not isinstance(patch, int):
        return batch
    with torch.no_grad():
        pixels = _pixels(config)
        for count in ((size // patch) ** 2, (size // patch) ** 2 + 1, (size // patch) ** 2 // 4, 4):
            ids = torch.cat([torch.full((ROWS, count), token), batch["input_ids"]], dim=1)
            found = {"input_ids": ids, "labels": ids.clone(), "pixel_values": pixels}
            try:
                model(**found)
            except Exception:  # another number of tokens, or another form of pixels
                continue
            return found
    return batch
