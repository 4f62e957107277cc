"""``from_pretrained`` of a folder that has a configuration and no weights: weights of zeros that take no memory.

A file in the form of safetensors is made beside links to the folder's own files: names, types and shapes as the model
has them, and a hole of the right size for the data. What loads weights runs as it is: casts, devices, quantizers.
transformers and diffusers; timm's models, which have no folder, keep their random weights.
"""

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuda_standin import imports
from cuda_standin.script import record
from cuda_standin.script.request import Request, request

_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64", "int32": "I32",
          "uint8": "U8", "int8": "I8", "bool": "BOOL"}  # fmt: skip
_LARGEST = 4 << 30  # a host maps no file at once that is larger than its memory
_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*pytorch_model*.bin", "*pytorch_model*.index.json")


def install(wanted: Request) -> None:
    if wanted.no_weights:
        imports.after_import(
            "transformers.modeling_utils", lambda module: _instead_of_weights(module.PreTrainedModel, _transformers)
        )
        imports.after_import(
            "diffusers.models.modeling_utils", lambda module: _instead_of_weights(module.ModelMixin, _diffusers)
        )
        imports.after_import("timm.models._builder", _random_weights)


def _instead_of_weights(base: Any, hole: Callable[[Any, Path], Path]) -> None:
    load = base.from_pretrained.__func__

    @functools.wraps(load)
    def from_pretrained(cls: Any, path: Any = None, *args: Any, **kwargs: Any) -> Any:
        folder = Path(str(path)) / (kwargs.get("subfolder") or "")
        if (folder / "config.json").is_file() and not any(any(folder.glob(pattern)) for pattern in _PATTERNS):
            path = hole(cls, folder)
            kwargs = {name: value for name, value in kwargs.items() if name not in ("subfolder", "variant")}
            record.notes.add(f"{folder} has no weights: they are zeros")
        return load(cls, path, *args, **kwargs)

    base.from_pretrained = classmethod(from_pretrained)


def _random_weights(module: Any) -> None:
    def load_pretrained(model: Any, *_: Any, **__: Any) -> None:
        record.notes.add(f"timm: {type(model).__name__} has no weights: they are random")

    module.load_pretrained = load_pretrained


def _diffusers(model_class: Any, folder: Path) -> Path:
    import torch

    with torch.device("meta"):
        model = model_class.from_config(model_class.load_config(folder))
    return folder_with_hole(model.state_dict(), torch.float32, folder, "diffusion_pytorch_model.safetensors")


def _transformers(model_class: Any, folder: Path) -> Path:
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.device("meta"):
        model = model_class._from_config(config) if hasattr(model_class, "_from_config") else model_class(config)
    shared = set(getattr(model, "_tied_weights_keys", None) or ())
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in shared}
    return folder_with_hole(state, dtype, folder, "model.safetensors")


def folder_with_hole(state: dict[str, Any], dtype: Any, folder: Path, name: str) -> Path:
    """A folder with links to the files of ``folder`` and with ``name``, a hole but for its header; several if large.

    Args:
        state: Tensors on ``meta``; those of floating point have ``dtype`` in the file.
    """
    made = Path(tempfile.mkdtemp(prefix="weights-", dir=request().folder))
    for file in folder.iterdir():
        (made / file.name).symlink_to(file.resolve())
    parts: list[dict[str, Any]] = [{}]
    size = 0
    for key, tensor in state.items():
        entry = _entry(tensor, dtype)
        if size + entry["bytes"] > _LARGEST and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][key] = entry
        size += entry["bytes"]
    if len(parts) == 1:
        _write_hole(made / name, parts[0])
        return made
    stem, places = name.removesuffix(".safetensors"), {}
    for number, part in enumerate(parts, 1):
        file = f"{stem}-{number:05}-of-{len(parts):05}.safetensors"
        _write_hole(made / file, part)
        places |= dict.fromkeys(part, file)
    total = sum(entry["bytes"] for part in parts for entry in part.values())
    (made / f"{name}.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return made


def _entry(tensor: Any, dtype: Any) -> dict[str, Any]:
    kept = dtype if tensor.is_floating_point() else tensor.dtype
    one = tensor.new_empty(0, dtype=kept).element_size()
    return {
        "dtype": _TYPES[str(kept).removeprefix("torch.")],
        "shape": list(tensor.shape),
        "bytes": tensor.numel() * one,
    }


def _write_hole(path: Path, entries: dict[str, Any]) -> None:
    """A file of safetensors without its data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, entry in entries.items():
        ends = at + entry["bytes"]
        header[key] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": [at, ends]}
        at = ends
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
