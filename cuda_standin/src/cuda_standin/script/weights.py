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
_OF_A_FILE = 5_000_000_000  # bytes
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
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    # What a hub has is the model that the configuration names. A new head on it is none of its weights.
    stored = getattr(transformers, (config.architectures or [""])[0], model_class)
    if isinstance(config, getattr(stored, "config_class", None) or ()):
        model_class = stored
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.device("meta"):
        model = model_class(config)  # not `_from_config`: under ZeRO-3 it shares out what it makes
    return folder_with_hole(_each_once(model), dtype, folder, "model.safetensors")


def _each_once(model: Any) -> dict[str, Any]:
    """The model's state, a tied tensor under its first name only: whether two are tied is the configuration's say."""
    known: set[int] = set()
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in known:
            state[name] = tensor
        known.add(id(tensor))
    return state


def folder_with_hole(state: dict[str, Any], dtype: Any, folder: Path, name: str) -> Path:
    """A folder with links to the files of ``folder`` and with ``name``, a hole but for its header.

    It is several files above ``_OF_A_FILE``, as on hubs: the system refuses to map one that is larger than its memory.

    Args:
        state: Tensors on ``meta``; those of floating point have ``dtype`` in the file.
    """
    import torch

    parts: list[dict[str, tuple[str, list[int], int]]] = [{}]
    filled = 0
    for key, tensor in state.items():
        kept = dtype if tensor.is_floating_point() else tensor.dtype
        size = tensor.numel() * torch.empty(0, dtype=kept).element_size()
        if filled and filled + size > _OF_A_FILE:
            parts.append({})
            filled = 0
        parts[-1][key] = (_TYPES[str(kept).removeprefix("torch.")], list(tensor.shape), size)
        filled += size
    made = Path(tempfile.mkdtemp(prefix="weights-", dir=request().folder))
    for file in folder.iterdir():
        (made / file.name).symlink_to(file.resolve())
    if len(parts) == 1:
        _write_hole(parts[0], made / name)
        return made
    stem, end = name.rsplit(".", 1)
    names = [f"{stem}-{number:05}-of-{len(parts):05}.{end}" for number in range(1, len(parts) + 1)]
    for part, file_name in zip(parts, names, strict=True):
        _write_hole(part, made / file_name)
    total = sum(size for part in parts for _, _, size in part.values())
    where = {key: file_name for part, file_name in zip(parts, names, strict=True) for key in part}
    (made / f"{name}.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    return made


def _write_hole(tensors: dict[str, tuple[str, list[int], int]], path: Path) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, (kind, shape, size) in tensors.items():
        header[key] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
