"""One way to train one model on one device, and what of it makes no sense."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lowtide.errors import LowtideError
from lowtide.estimation.device_table import Device
from lowtide.options import did_you_mean

# By name: dtype of the parameters, and the dtype of autocast around the step.
PRECISIONS: dict[str, tuple[str, str | None]] = {
    "fp32": ("float32", None),
    "bf16": ("bfloat16", None),
    "fp16": ("float16", None),
    "bf16-mixed": ("float32", "bfloat16"),
    "fp16-mixed": ("float32", "float16"),
}
OPTIMIZERS = ("adamw", "adam", "adamw_fused", "adamw_8bit", "sgd", "sgd_momentum", "adafactor", "muon", "none")
SHARDINGS = ("none", "zero1", "zero2", "zero3", "fsdp")
ATTENTIONS = ("auto", "sdpa", "eager")


class SetupError(LowtideError, ValueError):
    """A way to train that makes no sense; the message names the option."""


@dataclass(frozen=True)
class Setup:
    """One way to train one model.

    Attributes:
        batch_size: Sequences of one micro-batch of one rank; ``accumulate`` micro-batches make an optimizer's step.
        precision: A key of ``PRECISIONS``. ``master_weights``: the optimizer keeps a copy of 16-bit parameters in
            float32, and its state in float32.
        attention: ``auto``: what transformers takes for the model, fused where it can.
        lora_rank: Train adapters of this rank on every linear layer; 0: everything is trained. ``quantized``: the
            layers below them are of 4 bits (QLoRA).
        sharding: What data parallel ranks divide among themselves: ``none`` (a replica each), the optimizer
            (``zero1``), gradients too (``zero2``), parameters too (``zero3`` as DeepSpeed, ``fsdp`` as FSDP2).
        data_parallel, tensor_parallel: Degrees; their product is the number of devices.
        offload_optimizer, offload_activations: To host memory.
    """

    device: Device = field(hash=False)
    seq_len: int = 2048
    batch_size: int = 1
    accumulate: int = 1
    optimizer: str = "adamw"
    precision: str = "bf16"
    master_weights: bool = False
    attention: str = "auto"
    chunk_loss: bool = False
    lora_rank: int = 0
    quantized: bool = False
    sharding: str = "none"
    data_parallel: int = 1
    tensor_parallel: int = 1
    offload_optimizer: bool = False
    offload_activations: bool = False

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "accumulate", "data_parallel", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise SetupError(f"{_option(name)} {getattr(self, name)} is not positive. Pass 1 or more.")
        for name, known in (("optimizer", OPTIMIZERS), ("precision", tuple(PRECISIONS)), ("sharding", SHARDINGS),
                            ("attention", ATTENTIONS)):  # fmt: skip
            _check_known(name, getattr(self, name), known)
        if self.sharding != "none" and self.data_parallel == 1:
            raise SetupError(
                f"--sharding {self.sharding} has nothing to divide among: one data parallel rank. "
                "Pass --gpus or --data-parallel of 2 or more."
            )
        if self.master_weights and PRECISIONS[self.precision][0] == "float32":
            raise SetupError(
                f"--master-weights has no meaning with --precision {self.precision}: its parameters are float32."
            )
        if self.quantized and not self.lora_rank:
            raise SetupError("--quantized trains adapters on 4-bit layers. Pass --lora RANK with it.")
        if self.lora_rank < 0:
            raise SetupError(f"--lora {self.lora_rank} is no rank. Pass 1 or more, or leave it out.")
        if self.lora_rank and self.tensor_parallel > 1:
            raise SetupError("--lora with --tensor-parallel is not planned yet. Use --sharding fsdp.")

    @property
    def ranks(self) -> int:
        return self.data_parallel * self.tensor_parallel

    @property
    def sequences(self) -> int:
        """Of one optimizer's step, on all ranks."""
        return self.batch_size * self.accumulate * self.data_parallel

    @property
    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "device"} | {
            "device": self.device.name
        }


def degrees(gpus: int | None, data_parallel: int | None, tensor_parallel: int | None) -> tuple[int, int]:
    """(data parallel, tensor parallel) degrees from any two of the three numbers.

    Raises:
        SetupError: they contradict each other.
    """
    for option, value in (("--gpus", gpus), ("--data-parallel", data_parallel), ("--tensor-parallel", tensor_parallel)):
        if value is not None and value < 1:
            raise SetupError(f"{option} {value} is not positive. Pass 1 or more.")
    tensor = tensor_parallel or 1
    data = data_parallel or ((gpus or tensor) // tensor)
    if gpus is not None and data * tensor != gpus:
        raise SetupError(
            f"--gpus {gpus} is not --data-parallel {data} x --tensor-parallel {tensor} = {data * tensor}. "
            "Leave one of them out, or make the product right."
        )
    return data, tensor


def _check_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SetupError(
            f"{_option(name)} {value!r} is not known.{did_you_mean(value.lower(), known)} Use one of "
            f"{', '.join(known)}."
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
