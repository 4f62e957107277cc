"""One way to train one model on one device, and what of it makes no sense."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
OPTIMIZERS = (
    "adamw", "adam", "adamw_fused", "adamw_for_loop", "adamw_8bit", "sgd", "sgd_momentum", "adafactor", "muon", "none",
)  # fmt: skip
COMPUTE_DTYPES = ("bfloat16", "float16")
SHARDINGS = ("none", "zero1", "zero2", "zero3", "fsdp")
ATTENTIONS = ("auto", "sdpa", "eager")
_DIVIDED = ("tensor_parallel", "expert_parallel", "pipeline_parallel")  # of one model


class SetupError(LowtideError, ValueError):
    """A way to train that makes no sense; the message names the option."""


@dataclass(frozen=True)
class TrainingSetup:
    """One way to train one model.

    Attributes:
        batch_size: Sequences of one micro-batch of one rank; ``accumulate`` micro-batches make an optimizer's step.
        precision: A key of ``PRECISIONS``. ``master_weights``: the optimizer keeps a copy of 16-bit parameters in
            float32, and its state in float32.
        attention: ``auto``: what transformers takes for the model, fused where it can.
        compute_dtype: What FSDP2 casts its float32 shards to as it gathers them (``MixedPrecisionPolicy``); None: not
        lora_rank: Train adapters of this rank; 0: everything is trained. ``quantized``: linear layers are of 4 bits
            (QLoRA).
        lora_targets: Names of the layers that have adapters, empty: every linear layer. ``lora_dropout``: before them.
        selective_op: The plan is torchtitan's selective checkpointing by op; none is looked for.
        sharding: What data parallel ranks divide among themselves: ``none`` (a replica each), the optimizer
            (``zero1``), gradients too (``zero2``), parameters too (``zero3`` as DeepSpeed, ``fsdp`` as FSDP2).
        reshard: FSDP2 frees gathered parameters after forward, and gathers them again.
        data_parallel, tensor_parallel, pipeline_parallel: Degrees; their product is the number of devices.
        expert_parallel: Ranks that share the experts of each layer: a multiple of ``tensor_parallel`` that divides
            data times tensor parallel ranks, as transformers has it.
        sequence_parallel: Between attention and MLP, tensor parallel ranks hold a part of the tokens each.
        stage: Of a pipeline, which stage is asked about, from 0; None: the one that holds most.
        offload_optimizer, offload_activations: To host memory.
        optimizer_in_backward: Each gradient is used by the optimizer and freed as soon as it is complete (LOMO, Lv et
            al. 2023, https://arxiv.org/abs/2306.09782): gradients cannot be clipped by their global norm.
        cuda_version: Such as ``"11.2"``; None: one that loads kernels when they are first called.
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
    lora_targets: tuple[str, ...] = ()
    lora_dropout: float = 0.0
    quantized: bool = False
    selective_op: bool = False
    compute_dtype: str | None = None
    sharding: str = "none"
    reshard: bool = True
    data_parallel: int = 1
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    expert_parallel: int = 1
    pipeline_parallel: int = 1
    stage: int | None = None
    offload_optimizer: bool = False
    offload_activations: bool = False
    optimizer_in_backward: bool = False
    cuda_version: str | None = None

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "accumulate", "data_parallel", "tensor_parallel", "expert_parallel",
                     "pipeline_parallel"):  # fmt: skip
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
        if not self.lora_rank and (self.lora_targets or self.lora_dropout):
            option = "--lora-targets" if self.lora_targets else "--lora-dropout"
            raise SetupError(f"{option} is of adapters. Pass --lora RANK with it.")
        if not 0 <= self.lora_dropout < 1:
            raise SetupError(f"--lora-dropout {self.lora_dropout} is no probability below 1. Pass 0.05, say.")
        if self.compute_dtype is not None:
            self._check_compute_dtype(self.compute_dtype)
        if not self.reshard and self.sharding != "fsdp":
            raise SetupError(f"--no-reshard is of FSDP2; --sharding is {self.sharding}. Pass --sharding fsdp.")
        if self.selective_op and self.offload_activations:
            raise SetupError(
                "--selective-op is a plan of its own, which moves nothing. Leave --offload-activations out."
            )
        if self.optimizer_in_backward:
            self._check_optimizer_in_backward()
        if self.cuda_version is not None and not re.fullmatch(r"\d+\.\d+", self.cuda_version):
            raise SetupError(f"--cuda-version {self.cuda_version!r} is no version. Pass one such as 12.4.")
        self._check_parallel()

    def _check_compute_dtype(self, dtype: str) -> None:
        if dtype not in COMPUTE_DTYPES:
            raise SetupError(
                f"--compute-dtype {dtype!r} is not known.{did_you_mean(dtype.lower(), COMPUTE_DTYPES)} Use one of "
                f"{', '.join(COMPUTE_DTYPES)}."
            )
        if self.sharding != "fsdp":
            raise SetupError(
                f"--compute-dtype is what FSDP2 gathers its shards in; --sharding is {self.sharding}. Pass --sharding "
                "fsdp, or --precision bf16-mixed for autocast."
            )
        if self.precision != "fp32":
            raise SetupError(
                f"--compute-dtype {dtype} is for shards in float32; --precision is {self.precision}. Pass fp32, or "
                "leave one of them out."
            )

    def _check_optimizer_in_backward(self) -> None:
        held = {
            f"--accumulate {self.accumulate}": self.accumulate > 1, "several ranks": self.ranks > 1,
            "--offload-optimizer": self.offload_optimizer, "--optimizer none": self.optimizer == "none",
            "--master-weights": self.master_weights,
        }  # fmt: skip
        if against := [option for option, given in held.items() if given]:
            raise SetupError(
                f"--optimizer-in-backward uses each gradient as soon as one backward has made it, on one device; "
                f"{against[0]} does not go with that. Leave one of them out."
            )

    def _check_parallel(self) -> None:
        """Degrees that contradict each other, or what is combined with them."""
        tensor, experts, stages = self.tensor_parallel, self.expert_parallel, self.pipeline_parallel
        if self.lora_rank and max(tensor, experts, stages) > 1:
            option = _option(next(n for n in _DIVIDED if getattr(self, n) > 1))
            raise SetupError(f"--lora with {option} is not planned yet. Use --sharding fsdp.")
        if self.sequence_parallel and tensor == 1:
            raise SetupError(
                "--sequence-parallel divides tokens among tensor parallel ranks. Pass --tensor-parallel N."
            )
        if self.sequence_parallel and self.chunk_loss:
            raise SetupError("--chunk-loss with --sequence-parallel is not planned yet. Leave one of them out.")
        if experts > 1 and (experts % tensor or (self.data_parallel * tensor) % experts):
            raise SetupError(
                f"--expert-parallel {experts} has to be a multiple of --tensor-parallel {tensor} and divide "
                f"--data-parallel {self.data_parallel} x --tensor-parallel {tensor} = {self.data_parallel * tensor}."
            )
        if stages == 1:
            return
        if experts > 1:
            raise SetupError("--expert-parallel with --pipeline-parallel: transformers has no such plan. Pass one.")
        if self.chunk_loss:
            raise SetupError("--chunk-loss with --pipeline-parallel is not planned yet. Leave one of them out.")
        if self.sharding not in ("none", "zero1"):
            raise SetupError(
                f"--sharding {self.sharding} with --pipeline-parallel gathers or reduces in each micro-batch, which "
                "pipelines do not. Use zero1 or none."
            )

    @property
    def dtype(self) -> str:
        """Of the parameters that a step computes with."""
        return self.compute_dtype or PRECISIONS[self.precision][0]

    @property
    def context_bytes(self) -> int:
        """What the device's context takes."""
        return self.device.context_bytes_of(self.cuda_version)

    @property
    def ranks(self) -> int:
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel

    @property
    def micro_batches_in_flight(self) -> int:
        """Whose activations the stage that is asked about holds at most (one forward, one backward in turn: 1F1B).

        Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2.
        """
        return min(self.accumulate, self.pipeline_parallel - (self.stage or 0))

    @property
    def makes_gradients(self) -> bool:
        """The step that takes most makes its gradients: none is there before, since ``zero_grad()`` has freed them."""
        return self.accumulate == 1 and self.pipeline_parallel == 1

    @property
    def sequences(self) -> int:
        """Of one optimizer's step, on all ranks."""
        return self.batch_size * self.accumulate * self.data_parallel

    @property
    def as_json(self) -> dict[str, Any]:
        left_out = ("device", "stage")
        found = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in left_out}
        return found | {"device": self.device.name, "lora_targets": list(self.lora_targets)}


class Degrees(NamedTuple):
    data: int
    tensor: int
    pipeline: int


def degrees(
    gpus: int | None, data_parallel: int | None, tensor_parallel: int | None, pipeline_parallel: int | None = None
) -> Degrees:
    """Degrees whose product is the number of devices, from those that are given.

    Raises:
        SetupError: they contradict each other.
    """
    given = {"--gpus": gpus, "--data-parallel": data_parallel, "--tensor-parallel": tensor_parallel,
             "--pipeline-parallel": pipeline_parallel}  # fmt: skip
    for option, value in given.items():
        if value is not None and value < 1:
            raise SetupError(f"{option} {value} is not positive. Pass 1 or more.")
    tensor, pipeline = tensor_parallel or 1, pipeline_parallel or 1
    data = data_parallel or max((gpus or 1) // (tensor * pipeline), 1)
    if gpus is not None and data * tensor * pipeline != gpus:
        raise SetupError(
            f"--gpus {gpus} is not --data-parallel {data} x --tensor-parallel {tensor} x --pipeline-parallel "
            f"{pipeline} = {data * tensor * pipeline}. Leave one of them out, or make the product right."
        )
    return Degrees(data, tensor, pipeline)


def _check_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SetupError(
            f"{_option(name)} {value!r} is not known.{did_you_mean(value.lower(), known)} Use one of "
            f"{', '.join(known)}."
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
