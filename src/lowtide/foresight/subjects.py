"""What is to be trained, without memory: a model of transformers by its configuration, or a user's script.

Whatever makes a model here is called under a ``HollowMode``.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lowtide import long_sequences
from lowtide.errors import LowtideError
from lowtide.foresight import parallel_model, pipeline
from lowtide.foresight.image_text import image_batch, image_form
from lowtide.foresight.quantized_layers import expansion_of, installed_version, quantize, quantized_names
from lowtide.foresight.training_setup import PRECISIONS, SetupError, TrainingSetup
from lowtide.graph.repeated_layers import SHALLOW_LAYERS, with_layers
from lowtide.graph.step_graph import StepGraph
from lowtide.hollow.cuda_scripts import cuda_means_cpu
from lowtide.hollow.devices import TargetDevice, target_of
from lowtide.hollow.mode import HollowMode
from lowtide.hollow.models import language_batch, model_of
from lowtide.hollow.ranks import is_shared
from lowtide.models.shipped import UnknownModelError
from lowtide.scripts import load_step
from lowtide.tracing.sources import trace_hollow

# The first of these lists that has the configuration says which class is trained.
_TASKS = ("SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT",
          "IMAGE_CLASSIFICATION")  # fmt: skip
_USUAL_SEQ_LEN = 2048
_IMAGE_TOKENS = 256
_DEEP = 2  # times as many layers as a shallow model has: then tracing that one first is worth it
_SHARD_BYTES = 4  # an element of float32 shards
_WINDOW_FRAMES = 3000  # Whisper hears 30 seconds


@dataclass(frozen=True)
class Parameter:
    """One parameter of one rank; ``quantized``: stored in 4 bits. ``expert``: expert parallel ranks divided it.

    ``gradient_elements``: where they are not as many as its own.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trains: bool
    quantized: bool = False
    expert: bool = False
    gradient_elements: int | None = None

    @property
    def gradient_bytes(self) -> int:
        """Of its gradient; 0 where it is not trained."""
        count = self.elements if self.gradient_elements is None else self.gradient_elements
        return count * self.itemsize if self.trains else 0

    @property
    def elements(self) -> int:
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Facts:
    """Of a model as one rank has it, before anything runs."""

    parameters: tuple[Parameter, ...]
    buffer_bytes: int


class Subject:
    """What is trained. Traces are kept: many setups differ only in what surrounds the step."""

    name: str
    seq_len_most: int | None = None
    has_sizes = True  # whether batch size and length are the setup's to choose
    unit = "tokens"  # or "images": then a row has no length of its own, and counts as one

    def __init__(self) -> None:
        self.notes: list[str] = []  # on the batch, of which answers have to tell
        self._graphs: dict[tuple, StepGraph] = {}
        self._facts: dict[tuple, Facts] = {}
        self._modes: dict[TargetDevice, HollowMode] = {}

    def seq_len(self, asked: int | None) -> int:
        """``asked``, or what is usual. Raises: SetupError: a row has no length, and one was asked for."""
        if self.unit == "tokens":
            return min(_USUAL_SEQ_LEN, self.seq_len_most or _USUAL_SEQ_LEN) if asked is None else asked
        if asked is not None:
            raise SetupError(f"--seq-len {asked}: {self.name} takes {self.unit}, not sequences. Leave it out.")
        return 1

    def row_tokens(self, setup: TrainingSetup) -> int:
        """About so many tokens is one row of a batch."""
        return setup.seq_len if self.unit == "tokens" else _IMAGE_TOKENS

    def build(self, setup: TrainingSetup) -> tuple[nn.Module, Any, Callable[..., Any] | None]:
        """(model, batch, step); to be called under a ``HollowMode``."""
        raise NotImplementedError

    def check(self, setup: TrainingSetup) -> None:
        """Raises: SetupError: the model cannot be trained so."""

    def size_words(self, rows: int, seq_len: int) -> str:
        """Of a batch."""
        return f"{rows} {self.unit}" if self.unit != "tokens" else f"{rows} x {seq_len} tokens"

    def stage_layers(self, setup: TrainingSetup) -> range:
        """Layers of the stage that is asked about."""
        raise NotImplementedError

    def facts(self, setup: TrainingSetup) -> Facts:
        """Parameters as the setup has them; nothing runs."""
        key = _model_key(setup)
        if key not in self._facts:
            self.check(setup)
            with parallel_model.one_rank(self.name, setup), self._without_memory(target_of(setup.device)):
                model, _, _ = self.build(
                    setup if parallel_model.is_divided(setup) else replace(setup, chunk_loss=False)
                )
                quantized = quantized_names(model)
                experts = parallel_model.expert_names(model) if setup.expert_parallel > 1 else set()
                whole = parallel_model.whole_gradients(model, setup) if setup.tensor_parallel > 1 else {}
                self._facts[key] = Facts(
                    tuple(
                        Parameter(
                            n,
                            _shape(p),
                            _SHARD_BYTES if setup.compute_dtype else p.element_size(),
                            p.requires_grad,
                            n in quantized,
                            n in experts,
                            whole.get(n),
                        )
                        for n, p in model.named_parameters()
                    ),
                    sum(b.nbytes for b in model.buffers()),
                )
        return self._facts[key]

    def trace(self, setup: TrainingSetup) -> StepGraph:
        """The step of one rank, its optimizer left out."""
        key = (*_model_key(setup), setup.batch_size, setup.seq_len, setup.attention, setup.chunk_loss,
               setup.lora_dropout)  # fmt: skip
        if key not in self._graphs:
            self.check(setup)
            graph = self._trace(setup)
            told = [*graph.provenance.get("assumed", "").splitlines(), *self.notes]
            self._graphs[key] = replace(graph, provenance={**graph.provenance, "assumed": "\n".join(told)})
        return self._graphs[key]

    def _trace(self, setup: TrainingSetup) -> StepGraph:
        target = target_of(setup.device)
        with parallel_model.one_rank(self.name, setup):
            with self._without_memory(target) as mode:
                model, batch, step = self.build(setup)
            return trace_hollow(model, batch, target, step=step, optimizer=None, mode=mode)

    @contextmanager
    def _without_memory(self, target: TargetDevice) -> Iterator[HollowMode]:
        # It asks once, when it is imported, whether CUDA is there: not while CPUs stand for it. PEFT imports it.
        with suppress(ImportError):
            importlib.import_module("bitsandbytes")
        mode = self._modes.setdefault(target, HollowMode(target.kernels))
        # What has no memory is the CPU's, whatever the default device is.
        with torch.device("cpu"), mode, nullcontext() if target.kernels == "cpu" else cuda_means_cpu(mode):
            yield mode


class ConfigSubject(Subject):
    """A model of transformers, by its configuration."""

    def __init__(self, facts: dict[str, Any], config: Any) -> None:
        super().__init__()
        self.name, self.config = facts["name"], config
        self._text = config.get_text_config(decoder=True)
        self._layers_alike = True  # until a trace shows otherwise
        self.seq_len_most = getattr(self._text, "max_position_embeddings", None)
        if self.task == "IMAGE_CLASSIFICATION":
            self.seq_len_most, self.unit = None, "images"

    @cached_property
    def task(self) -> str:
        import transformers

        sees = getattr(self.config, "vision_config", None) is not None
        for task in ("IMAGE_TEXT_TO_TEXT", *_TASKS) if sees else _TASKS:
            if type(self.config) in getattr(transformers, f"MODEL_FOR_{task}_MAPPING", ()):
                return task
        raise UnknownModelError(f"transformers has no model that trains for a {type(self.config).__name__}.")

    def check(self, setup: TrainingSetup) -> None:
        most = self.seq_len_most
        if most is not None and setup.seq_len > most:
            raise SetupError(
                f"--seq-len {setup.seq_len} is longer than the {most} positions of {self.name}. "
                "Pass a shorter one, or a config with more positions."
            )
        parallel_model.check(self.name, self._text, setup)
        if setup.chunk_loss and self.task != "CAUSAL_LM":
            raise SetupError(f"--chunk-loss is for causal language models; {self.name} is none.")

    def stage_layers(self, setup: TrainingSetup) -> range:
        return pipeline.layers_of(setup.stage or 0, setup.pipeline_parallel, self._text.num_hidden_layers)

    def _trace(self, setup: TrainingSetup) -> StepGraph:
        """That of a few layers, one of which is repeated; all of them where they are not alike."""
        layers = getattr(self._text, "num_hidden_layers", 0)
        deep = self.task == "CAUSAL_LM" and layers >= _DEEP * SHALLOW_LAYERS and setup.pipeline_parallel == 1
        if deep and self._layers_alike:
            whole = self.config
            self.config = _with_fewer_layers(whole, SHALLOW_LAYERS)
            try:
                graph = with_layers(super()._trace(setup), layers) if self.config is not None else None
            finally:
                self.config = whole
            if graph is not None:
                return graph
            self._layers_alike = False
        return super()._trace(setup)

    def build(self, setup: TrainingSetup) -> tuple[nn.Module, Any, Callable[..., Any] | None]:
        import transformers

        dtype, autocast = setup.dtype, PRECISIONS[setup.precision][1]
        config = copy.deepcopy(self.config)
        config.architectures = [getattr(transformers, f"MODEL_FOR_{self.task}_MAPPING")[type(config)].__name__]
        config.dtype = getattr(torch, dtype)
        if self.task == "SEQ_TO_SEQ_CAUSAL_LM" and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id or 0
        if setup.attention != "auto":
            config._attn_implementation = setup.attention
        try:
            model = model_of(config)
        except LowtideError:
            raise
        except Exception as error:  # whatever a model's constructor refuses
            if setup.attention != "auto" and "attention implementation" in str(error):
                raise SetupError(f"--attention {setup.attention}: {self.name} has none. Leave it out.") from error
            raise UnknownModelError(f"transformers cannot build {self.name}: {error}") from error
        if parallel_model.is_divided(setup):
            parallel_model.wrap(model, setup)
        if setup.lora_rank:
            model = _with_adapters(model, setup)
        if setup.quantized:
            quantize(model, expansion_of(installed_version()))
        if setup.chunk_loss:
            long_sequences.prepare(model, chunk_loss=True, tile_mlp=None, say=None)
        batch, step = self._batch(setup, getattr(torch, dtype), model), None
        if setup.pipeline_parallel > 1:
            tokens = setup.seq_len // (setup.tensor_parallel if setup.sequence_parallel else 1)
            received = (setup.batch_size, tokens, self._text.hidden_size)
            batch = pipeline.stage_batch(
                batch, setup.stage or 0, setup.pipeline_parallel, received, getattr(torch, dtype)
            )
            step = pipeline.stage_step
        return model, batch, in_autocast(target_of(setup.device), autocast, step or _loss) if autocast else step

    def _batch(self, setup: TrainingSetup, dtype: torch.dtype, model: nn.Module) -> dict[str, torch.Tensor]:
        rows, tokens = setup.batch_size, setup.seq_len
        if self.task == "IMAGE_CLASSIFICATION":
            side, channels = getattr(self.config, "image_size", 224), getattr(self.config, "num_channels", 3)
            self.notes[:] = [f"images of {side} x {side} pixels"]
            return {"pixel_values": torch.empty(rows, channels, side, side, dtype=dtype, device="meta"),
                    "labels": torch.zeros(rows, dtype=torch.int64)}  # fmt: skip
        if self.task == "SPEECH_SEQ_2_SEQ":
            heard = torch.empty(rows, self.config.num_mel_bins, _WINDOW_FRAMES, dtype=dtype, device="meta")
            return {"input_features": heard, "labels": torch.zeros(rows, tokens, dtype=torch.int64)}
        if self.task == "IMAGE_TEXT_TO_TEXT":
            form = image_form(model, self.config, dtype)
            self.notes[:] = [form[-1]]
            return image_batch(self.config, form, rows, tokens)
        return language_batch(rows, tokens)


class ScriptSubject(Subject):
    """What ``SCRIPT.py:FUNCTION`` returns; it runs once for each trace, with nothing in memory."""

    has_sizes = False

    def __init__(self, target: str) -> None:
        super().__init__()
        self.name = target

    def check(self, setup: TrainingSetup) -> None:
        for option, given in (("--tensor-parallel", setup.tensor_parallel > 1),
                              ("--expert-parallel", setup.expert_parallel > 1),
                              ("--pipeline-parallel", setup.pipeline_parallel > 1), ("--lora", setup.lora_rank > 0),
                              ("--chunk-loss", setup.chunk_loss),
                              ("--compute-dtype", setup.compute_dtype is not None)):  # fmt: skip
            if given:
                raise SetupError(f"{option} is for models by configuration. Do it in {self.name} itself.")

    def build(self, setup: TrainingSetup) -> tuple[nn.Module, Any, Callable[..., Any] | None]:
        model, batch, step = load_step(self.name)
        return model, batch, step


def _model_key(setup: TrainingSetup) -> tuple:
    """What decides over the parameters, and how they are stored."""
    divided = (setup.tensor_parallel, setup.sequence_parallel, setup.expert_parallel, setup.pipeline_parallel,
               setup.stage or 0, setup.chunk_loss and setup.tensor_parallel > 1)  # fmt: skip
    adapters = (setup.lora_rank, setup.lora_targets, setup.quantized)
    return target_of(setup.device), setup.precision, setup.compute_dtype, divided, adapters


def _with_fewer_layers(config: Any, layers: int) -> Any | None:
    """``config`` with its first ``layers``; None where it says that they are of several kinds."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if kinds and len(set(kinds)) > 1:
        return None
    text.num_hidden_layers = layers
    if kinds and "layer_types" in vars(text):
        text.layer_types = kinds[:layers]
    return config


def _shape(parameter: Any) -> tuple[int, ...]:
    """Of this rank's part, where ranks share it."""
    return tuple(parameter._local_tensor.shape if is_shared(parameter) else parameter.shape)


def _with_adapters(model: nn.Module, setup: TrainingSetup) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise SetupError("--lora needs PEFT. Install it: pip install peft") from None
    targets = list(setup.lora_targets) or "all-linear"
    settings = LoraConfig(r=setup.lora_rank, target_modules=targets, lora_dropout=setup.lora_dropout)
    try:
        # Their values are nobody's: on ``meta`` they take no memory and no time.
        adapted: nn.Module = get_peft_model(model, settings, low_cpu_mem_usage=True)
    except ValueError as error:  # none of the names is a layer's, or one is of a layer that takes no adapter
        linear = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise SetupError(
            f"--lora-targets {','.join(setup.lora_targets)}: {error} Linear layers are {', '.join(linear)}."
        ) from error
    return adapted


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def in_autocast(
    target: TargetDevice, dtype: str, run: Callable[[nn.Module, Any], torch.Tensor]
) -> Callable[[nn.Module, Any], torch.Tensor]:
    """``run`` under autocast of the target's kernels."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast(target.kernels, dtype=getattr(torch, dtype)):
            return run(model, batch)

    return step
