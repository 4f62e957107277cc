"""Batches with labels, by task: several candidates each, of which the first that gives a loss is used."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zoo.configs import HEADS, IMAGE, TOKENS_FROM, VOCABULARY

TOKENS, ROWS = 16, 2
Batch = dict[str, Any]
OUTPUTS = ("logits", "last_hidden_state")


def loss_of(output: Any) -> torch.Tensor | None:
    """The model's own loss, or one made of its output."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    returned = next((v for n in OUTPUTS if (v := getattr(output, n, None)) is not None), None)
    return None if returned is None else returned.float().square().mean()


def first_taken(model: nn.Module, batches: Iterator[Batch]) -> Batch:
    """The first of ``batches`` that gives a loss; if none does, the first with an output to make a loss of.

    Raises:
        Exception: the model's own for the first batch, if it takes none.
    """
    refused: Exception | None = None
    lossless: Batch | None = None
    for batch in batches:
        try:
            with torch.no_grad():
                output = model(**batch)
        except Exception as error:  # another shape, or another name
            refused = refused or error
            continue
        if getattr(output, "loss", None) is not None:
            return batch
        if lossless is None and loss_of(output) is not None:
            lossless = batch
    if lossless is not None:
        return lossless
    assert refused is not None
    raise refused


def batches(task: str, config: Any, model: nn.Module) -> Iterator[Batch]:
    """Candidates to try, the most specific first."""
    own = PARTICULAR.get(getattr(config, "model_type", ""))
    if own is not None:
        yield own(config)
    yield from MAKERS[task](config, model)


def text(config: Any, model: nn.Module) -> Iterator[Batch]:
    ids = _ids(config)
    yield {"input_ids": ids, "labels": ids.clone()}
    most = getattr(config, "max_position_embeddings", None)
    if most:  # where the answer has as many places as there are positions
        longer = _ids(config, most)
        yield {"input_ids": longer, "labels": longer.clone()}
    accepted = inspect.signature(model.forward).parameters
    if "pixel_values" in accepted:
        yield {"input_ids": ids, "labels": ids.clone(), "pixel_values": _pixels(config)}
    books = getattr(getattr(config, "decoder", config), "num_codebooks", None)
    if books:  # several streams of codes
        codes = torch.randint(3, _vocabulary(config), (ROWS, TOKENS, books))
        flat = codes.permute(0, 2, 1).reshape(ROWS * books, TOKENS)
        yield {"input_ids": flat, "labels": codes}
        yield {"input_ids": ids, "decoder_input_ids": flat, "labels": codes}
    if "input_features" in accepted:
        for features in _features(config, model):
            yield {"input_ids": ids, "labels": ids.clone(), **features}


def image(config: Any, model: nn.Module) -> Iterator[Batch]:
    labels = torch.randint(0, config.num_labels, (ROWS,))
    for pixels in (_pixels(config), torch.randn(ROWS, 3, 2 * IMAGE, 2 * IMAGE)):
        yield {"pixel_values": pixels, "labels": labels}
    if "input_ids" in inspect.signature(model.forward).parameters:
        ids = _ids(config)
        yield {"input_ids": ids, "labels": labels}
        yield {"input_ids": ids, "labels": ids.clone()}
    yield {**_patches_in_rows(config), "labels": labels}


def segmentation(config: Any, model: nn.Module) -> Iterator[Batch]:
    for pixels in (_pixels(config), torch.randn(ROWS, 3, 2 * IMAGE, 2 * IMAGE)):
        labels = torch.randint(0, config.num_labels, (ROWS, *pixels.shape[-2:]))
        yield {"pixel_values": pixels, "labels": labels}


def video(config: Any, model: nn.Module) -> Iterator[Batch]:
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", HEADS)
    pixels = torch.stack([_pixels(config) for _ in range(frames)], dim=1)
    named = "pixel_values_videos" in inspect.signature(model.forward).parameters
    yield {
        "pixel_values_videos" if named else "pixel_values": pixels,
        "labels": torch.randint(0, config.num_labels, (ROWS,)),
    }


def waveform(config: Any, model: nn.Module) -> Iterator[Batch]:
    labels = torch.randint(3, 20, (ROWS, 2))
    yield from ({**heard, "labels": labels} for heard in _heard(config, model))


def speech(config: Any, model: nn.Module) -> Iterator[Batch]:
    labels = _ids(config, 6)
    for heard in _heard(config, model):
        yield {**heard, "labels": labels}
        yield {**heard, "labels": labels, "input_ids": labels}
        yield {**heard, "labels": labels, "decoder_input_ids": labels}


def audio(config: Any, model: nn.Module) -> Iterator[Batch]:
    labels = torch.randint(0, config.num_labels, (ROWS,))
    yield from ({**heard, "labels": labels} for heard in _heard(config, model))


def image_text(config: Any, model: nn.Module) -> Iterator[Batch]:
    """Image and text if the place of image tokens is known, else text alone."""
    ids = _ids(config)
    accepted = inspect.signature(model.forward).parameters
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    vision = getattr(config, "vision_config", config)
    patch = getattr(vision, "patch_size", None)
    merge = getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_size", None) or 1
    if token is not None and "image_grid_thw" in accepted and isinstance(patch, int):
        side = 2 * merge
        depth = 3 * patch * patch
        depth *= getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None) or 1
        grid = torch.tensor([[1, side, side]] * ROWS)
        start = getattr(config, "vision_start_token_id", None)
        before = [] if start is None else [torch.full((ROWS, 1), start)]
        placed = torch.cat([*before, torch.full((ROWS, 4), token), ids], dim=1)
        count = ROWS * side * side
        forms = [torch.randn(count, depth), torch.randn(1, count, 3, patch, patch), torch.randn(count, 3, patch, patch)]
        for pixels in forms:
            flat = {"pixel_values": pixels, "image_grid_thw": grid}
            kinds = (placed == token).int()
            yield {"input_ids": placed, "labels": placed.clone(), **flat, "mm_token_type_ids": kinds}
            yield {"input_ids": placed, "labels": placed.clone(), **flat}
    if token is not None:
        pixels = _pixels(config)
        size = pixels.shape[-1]
        whole = (size // patch) ** 2 if isinstance(patch, int) else 4
        forms = [{"pixel_values": pixels}, {"pixel_values": pixels.unsqueeze(1)}]
        forms += [{"pixel_values": pixels, "image_sizes": torch.full((ROWS, 2), size)}]
        if "qformer_input_ids" in accepted:
            forms += [
                {"pixel_values": pixels, "qformer_input_ids": ids, "qformer_attention_mask": torch.ones_like(ids)}
            ]
        for count in dict.fromkeys((whole, whole + 1, whole // 4, whole // 16, 4, 1, 2, 8, 256)):
            placed = torch.cat([torch.full((ROWS, max(count, 1)), token), ids], dim=1)
            for form in forms:
                yield {"input_ids": placed, "labels": placed.clone(), **form}
    if "flattened_patches" in accepted:
        width = getattr(vision, "patch_embed_hidden_size", 3 * 8 * 8)
        yield {"flattened_patches": torch.rand(ROWS, 9, 2 + width), "labels": ids}
    if "pixel_values" in accepted:
        pixels = _pixels(config)
        both = {"input_ids": ids, "labels": ids.clone(), "pixel_values": pixels}
        yield both
        yield {**both, "qformer_input_ids": ids, "qformer_attention_mask": torch.ones_like(ids)}
        yield {**both, "image_embeds_position_mask": (torch.arange(TOKENS) < HEADS).expand(ROWS, TOKENS)}
        yield {**both, "pixel_values": pixels.unsqueeze(1), "image_attention_mask": torch.ones(ROWS, TOKENS, 1)}
        yield {"pixel_values": pixels, "labels": ids}
        yield {**both, "bbox": torch.rand(ROWS, TOKENS, 4)}
    yield {"input_ids": ids, "labels": ids.clone()}
    yield {"input_ids": ids, "labels": ids.clone(), "mm_token_type_ids": torch.zeros_like(ids)}


def _vocabulary(config: Any) -> int:
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(min(getattr(inner, "vocab_size", None) or VOCABULARY, TOKENS_FROM))


def _ids(config: Any, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, _vocabulary(config), (ROWS, tokens))


def _pixels(config: Any) -> torch.Tensor:
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    size = getattr(vision, "image_size", None) or IMAGE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(vision, "num_channels", 3)
    return torch.randn(ROWS, channels if isinstance(channels, int) else 3, height, width)


def _patches_in_rows(config: Any) -> Batch:
    vision = getattr(config, "vision_config", config)
    patch = getattr(vision, "patch_size", 8)
    return {
        "pixel_values": torch.randn(ROWS, 16, 3 * patch * patch) if isinstance(patch, int) else torch.empty(0),
        "pixel_attention_mask": torch.ones(ROWS, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * ROWS),
    }


def _heard(config: Any, model: nn.Module) -> Iterator[Batch]:
    accepted = inspect.signature(model.forward).parameters
    if "input_features" in accepted:
        for features in _features(config, model):
            yield features
            mask = torch.ones(ROWS, features["input_features"].shape[1], dtype=torch.long)
            yield {**features, "attention_mask": mask}
    values = "audio_values" if "audio_values" in accepted else "input_values"
    for samples in (2000, 8000):
        heard = torch.randn(ROWS, samples)
        yield {values: heard}
        yield {values: heard, "attention_mask": torch.ones(ROWS, samples, dtype=torch.long)}
    bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    if bins and frames:  # a spectrogram under the name of a waveform
        yield {values: torch.randn(ROWS, frames, bins)}


def _features(config: Any, model: nn.Module) -> Iterator[Batch]:
    inner = [getattr(config, name, None) for name in ("audio_config", "encoder_config", "encoder")]
    for part in (config, *(part for part in inner if part is not None)):
        known = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "d_model")
        for bins in dict.fromkeys(getattr(part, name) for name in known if getattr(part, name, None)):
            if "Whisper" not in type(model).__name__:
                yield {"input_features": torch.randn(ROWS, 64, bins)}
            frames = 2 * (getattr(part, "max_source_positions", None) or 32)
            yield {"input_features": torch.randn(ROWS, bins, frames)}


def _with_actions(config: Any) -> Batch:
    """Of a robot: camera image, instruction, state of its arms, and the actions to learn."""
    vlm = config.vlm_config
    pixels = _pixels(vlm)
    patches = (pixels.shape[-1] // vlm.vision_config.patch_size) ** 2
    ids = torch.cat([torch.full((ROWS, patches), vlm.image_token_id), _ids(vlm.text_config)], dim=1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels.unsqueeze(1),
        "pixel_attention_mask": torch.ones(ROWS, 1, dtype=torch.bool),
        "state": torch.randn(ROWS, config.max_state_dim),
        "actions": torch.randn(ROWS, config.chunk_size, config.max_action_dim),
    }


def _with_frames(config: Any) -> Batch:
    """A video with a question about it."""
    frames = 4
    pixels = torch.stack([_pixels(config) for _ in range(frames)], dim=1)
    ids = torch.cat(
        [torch.full((ROWS, frames * config.num_query_tokens), config.video_token_index), _ids(config)], dim=1
    )
    question = _ids(config)
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "pixel_values": pixels,
        "qformer_input_ids": question,
        "qformer_attention_mask": torch.ones_like(question),
    }


def _with_codes(config: Any) -> Batch:
    """Text and audio codes of it."""
    channels = config.decoder_config.num_channels
    codes = torch.randint(3, 60, (ROWS, 8, channels))
    labels = codes.transpose(1, 2).flatten(0, 1)
    return {"input_ids": _ids(config.encoder_config), "decoder_input_ids": codes, "labels": labels}


def _with_streams(config: Any) -> Batch:
    """A stream of words, each with its audio codes."""
    ids = torch.randint(3, 60, (ROWS, TOKENS, config.num_codebooks + 1))
    return {"input_ids": ids, "labels": ids[..., 0].clone()}


def _with_spectrum(config: Any) -> Batch:
    """Text with as many tokens as the audio has frames."""
    ids = _ids(config)
    frames = TOKENS * config.audio_length_per_tok
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "input_features": torch.randn(ROWS, config.audio_config.num_mel_bins, frames),
        "use_cache": False,
    }


def _with_samples(config: Any) -> Batch:
    """Audio whose frames have placeholder tokens in the text."""
    coder = getattr(config, "audio_config", None) or config.acoustic_tokenizer_encoder_config
    moments = 8
    samples = moments * coder.hop_length
    ids = torch.cat([torch.full((ROWS, moments), config.audio_token_id), _ids(config)], dim=1)
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "input_values": torch.randn(ROWS, 1, samples),
        "padding_mask": torch.ones(ROWS, samples, dtype=torch.bool),
    }


def _with_many_places(config: Any) -> Batch:
    """An image that takes one token more than its encoder has queries."""
    ids = torch.cat([torch.full((ROWS, 145), config.image_token_id), _ids(config)], dim=1)
    return {"input_ids": ids, "labels": ids.clone(), "pixel_values": _pixels(config)}


def _with_tiles(config: Any) -> Batch:
    """An image given whole and as one tile of half the size, with an end token after each line of the tile."""
    pixels = torch.stack([_pixels(config)] * 2, dim=1)
    side = pixels.shape[-1] // config.vision_config.patch_size // 2
    ids = torch.cat([torch.full((ROWS, side * side + side * (side + 1)), config.image_token_id), _ids(config)], dim=1)
    sizes = torch.full((ROWS, 2), pixels.shape[-1])
    return {"input_ids": ids, "labels": ids.clone(), "pixel_values": pixels, "image_sizes": sizes}


# What a single architecture wants, by ``model_type``.
PARTICULAR: dict[str, Callable[[Any], Batch]] = {
    "deepseek_ocr2": _with_many_places,
    "dia": _with_codes,
    "granite4_vision": _with_tiles,
    "instructblipvideo": _with_frames,
    "kyutai_speech_to_text": _with_streams,
    "pi0": _with_actions,
    "vibevoice": _with_samples,
    "vibevoice_asr": _with_samples,
    "voxtral_realtime": _with_spectrum,
}
MAKERS: dict[str, Callable[[Any, nn.Module], Iterator[Batch]]] = {
    "causal language": text,
    "sequence to sequence": text,
    "masked language": text,
    "image classification": image,
    "semantic segmentation": segmentation,
    "video classification": video,
    "speech recognition (CTC)": waveform,
    "speech to text": speech,
    "audio classification": audio,
    "image and text": image_text,
}
