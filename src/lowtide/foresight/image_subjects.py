"""Models of images from timm and diffusers, without memory: what ``--model`` may name besides transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide.errors import LowtideError
from lowtide.foresight.subjects import Subject, in_autocast
from lowtide.foresight.training_setup import PRECISIONS, SetupError, TrainingSetup
from lowtide.hollow.devices import target_of
from lowtide.models.shipped import UnknownModelError
from lowtide.options import did_you_mean

_TEXT_TOKENS = 77  # CLIP's
_SIDE = 64  # of latents, where a config does not say


class ImageSubject(Subject):
    """A model of images: the setup says how many, the model how large."""

    unit = "images"

    def check(self, setup: TrainingSetup) -> None:
        for option, given in (
            ("--tensor-parallel", setup.tensor_parallel > 1), ("--expert-parallel", setup.expert_parallel > 1),
            ("--pipeline-parallel", setup.pipeline_parallel > 1), ("--lora", setup.lora_rank > 0),
            ("--chunk-loss", setup.chunk_loss), (f"--attention {setup.attention}", setup.attention != "auto"),
        ):  # fmt: skip
            if given:
                raise SetupError(f"{option} is for models of transformers. Use SCRIPT.py:FUNCTION for {self.name}.")

    def build(self, setup: TrainingSetup) -> tuple[nn.Module, Any, Callable[..., Any] | None]:
        autocast, made = PRECISIONS[setup.precision][1], getattr(torch, setup.dtype)
        model = nn.Module.to(self.model(), made).train()  # diffusers' own warns of what from_pretrained does
        batch, step = self.batch(model, setup.batch_size, made), self.loss
        sizes = [f"{name} of {' x '.join(map(str, x.shape[1:]))}" for name, x in batch.items() if x.dim() > 1]
        self.notes[:] = [f"for each image: {', '.join(sizes)}"]
        return model, batch, in_autocast(target_of(setup.device), autocast, step) if autocast else step

    def model(self) -> nn.Module:
        """With random weights that nobody draws."""
        raise NotImplementedError

    def batch(self, model: nn.Module, rows: int, dtype: torch.dtype) -> dict[str, Any]:
        """What ``loss`` takes."""
        raise NotImplementedError

    @staticmethod
    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        """Of a training step."""
        raise NotImplementedError


class TimmSubject(ImageSubject):
    """An image classifier of timm, at the size that its own configuration names. ``timm/resnet50``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._timm = _imported("timm", name)
        self._model = name.removeprefix("timm/")
        if not self._timm.is_model(self._model):
            hint = did_you_mean(self._model, self._timm.list_models())
            raise UnknownModelError(f"timm has no model {self._model!r}.{hint} timm.list_models() has them all.")

    def model(self) -> nn.Module:
        made: nn.Module = self._timm.create_model(self._model, pretrained=False)
        return made

    def batch(self, model: nn.Module, rows: int, dtype: torch.dtype) -> dict[str, Any]:
        size = model.default_cfg["input_size"]
        return {
            "pixels": torch.empty(rows, *size, dtype=dtype, device="meta"),
            "labels": torch.zeros(rows, dtype=torch.int64),
        }

    @staticmethod
    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["pixels"]), batch["labels"])


class DiffusersSubject(ImageSubject):
    """A denoiser or an autoencoder of diffusers by its ``config.json``; the loss is the mean squared error.

    Raises:
        UnknownModelError: it is not installed, has no such class, or a class that is called in ways not known here.
    """

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        super().__init__()
        self.name = str(path)
        kind = config["_class_name"]
        self._kind: Any = getattr(_imported("diffusers", self.name), kind, None)
        if self._kind is None:
            raise UnknownModelError(f"diffusers has no class {kind}, which {path} names.")
        if kind not in _INPUTS:
            raise UnknownModelError(
                f"{path} is of a {kind}. How that is called in training is not known here; "
                f"known are {', '.join(sorted(_INPUTS))}. Use SCRIPT.py:FUNCTION, which returns (model, batch, step)."
            )
        self._config = {name: value for name, value in config.items() if not name.startswith("_")}
        self._inputs = _INPUTS[kind]

    def model(self) -> nn.Module:
        try:
            made: nn.Module = self._kind.from_config(self._config)
        except Exception as error:  # whatever a constructor refuses
            raise UnknownModelError(f"diffusers cannot build {self.name}: {error}") from error
        return made

    def batch(self, model: nn.Module, rows: int, dtype: torch.dtype) -> dict[str, Any]:
        found = self._inputs(model.config, rows)
        return {name: x.to(dtype) if x.is_floating_point() else x for name, x in found.items()}

    @staticmethod
    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        given = dict(batch)
        conditions = {name: given.pop(name) for name in ("text_embeds", "time_ids") if name in given}
        if conditions:
            given["added_cond_kwargs"] = conditions
        out = model(**given, return_dict=False)[0]
        target: torch.Tensor = batch["sample" if "sample" in batch else "hidden_states"]
        if out.shape[1] != target.shape[1]:  # a learned variance beside the mean
            out = out[:, : target.shape[1]]
        return nn.functional.mse_loss(out.float(), target.float())


def _latents(config: Any, rows: int) -> torch.Tensor:
    side = config.get("sample_size") or _SIDE
    height, width = (side, side) if isinstance(side, int) else side
    return torch.empty(rows, config["in_channels"], height, width, device="meta")


def _times(rows: int) -> torch.Tensor:
    return torch.zeros(rows, dtype=torch.int64)


def _unet(config: Any, rows: int) -> dict[str, torch.Tensor]:
    found = {"sample": _latents(config, rows), "timestep": _times(rows)}
    if config.get("num_class_embeds"):
        found["class_labels"] = _times(rows)
    return found


def _unet_with_text(config: Any, rows: int) -> dict[str, torch.Tensor]:
    width = config.get("encoder_hid_dim") or config["cross_attention_dim"]
    width = width if isinstance(width, int) else width[0]
    found = _unet(config, rows) | {"encoder_hidden_states": torch.empty(rows, _TEXT_TOKENS, width, device="meta")}
    if config.get("addition_embed_type") == "text_time":  # SDXL: six numbers about the picture, and a pooled text
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        found["text_embeds"] = torch.empty(rows, pooled, device="meta")
        found["time_ids"] = torch.empty(rows, 6, device="meta")
    return found


def _classes(config: Any, rows: int) -> dict[str, torch.Tensor]:
    return {"hidden_states": _latents(config, rows), "timestep": _times(rows), "class_labels": _times(rows)}


def _joint(config: Any, rows: int) -> dict[str, torch.Tensor]:
    text = torch.empty(rows, _TEXT_TOKENS + 256, config["joint_attention_dim"], device="meta")  # CLIP's and T5's
    pooled = torch.empty(rows, config["pooled_projection_dim"], device="meta")
    return {"hidden_states": _latents(config, rows), "timestep": _times(rows), "encoder_hidden_states": text,
            "pooled_projections": pooled}  # fmt: skip


def _pixels(config: Any, rows: int) -> dict[str, torch.Tensor]:
    return {"sample": _latents(config, rows)}


_INPUTS: dict[str, Callable[[Any, int], dict[str, torch.Tensor]]] = {
    "UNet2DModel": _unet,
    "UNet2DConditionModel": _unet_with_text,
    "DiTTransformer2DModel": _classes,
    "SD3Transformer2DModel": _joint,
    "AutoencoderKL": _pixels,
}


def diffusers_config(name: str) -> tuple[Path, dict[str, Any]] | None:
    """The ``config.json`` of a model of diffusers that ``name`` is the path of, or of its directory."""
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return (path, body) if isinstance(body, dict) and isinstance(body.get("_class_name"), str) else None


def _imported(library: str, name: str) -> Any:
    try:
        return __import__(library)
    except ImportError as error:
        raise LowtideError(f"{name} is a model of {library}, which cannot be imported: {error}") from None
