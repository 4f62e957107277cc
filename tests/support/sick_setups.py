"""Set-ups as people have them, one for each check of the doctor: what is wrong, and the same mended."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from support.unseen_memory import memory_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide
from lowtide.settings import checkpointing_names
from lowtide.settings.checkpointing_names import OLD, word_in

warnings.filterwarnings("ignore", message=".*use_reentrant.*|.*None of the inputs.*")

IDS = torch.randint(0, 64, (2, 64), generator=torch.Generator(torch.get_default_device()).manual_seed(1))
TOKENS = {"input_ids": IDS, "labels": IDS}
ROWS = torch.randn(32, 64, generator=torch.Generator(torch.get_default_device()).manual_seed(2))


@dataclass
class Case:
    """What ``diagnose`` is called with."""

    model: nn.Module
    batch: Any = None
    step: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], Any] = contextlib.nullcontext

    def __post_init__(self) -> None:
        self.batch = ROWS if self.batch is None else self.batch


def diagnosed(case: Case, code: str) -> lowtide.Diagnosis:
    """What one check finds."""
    fit = case.options.pop("fit", None)
    with case.around(), fit or contextlib.nullcontext():
        return lowtide.diagnose(case.model, case.batch, case.step, only=[code], **case.options)


def llama(layers: int = 4, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    defaults: dict[str, Any] = dict(vocab_size=64, hidden_size=32, intermediate_size=64, use_cache=False)
    config = LlamaConfig(
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, **(defaults | settings)
    )
    return AutoModelForCausalLM.from_config(config).train()


class Stack(nn.Module):
    """Blocks, each called by ``how``."""

    def __init__(self, block: Callable[[], nn.Module], how: Callable[..., Any] | None = None, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.how = how or functools.partial(checkpoint, use_reentrant=False)
        self.first = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = self.how(layer, x)
        return x


def mlp(dropout: float = 0.0, norm: bool = False) -> nn.Module:
    parts = [nn.Linear(64, 256), nn.BatchNorm1d(256) if norm else nn.Identity(), nn.GELU(), nn.Dropout(dropout)]
    return nn.Sequential(*parts, nn.Linear(256, 64))


def plain(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


# -- wrong numbers ------------------------------------------------------------------------------------------


def forgets_random_state(preserve: bool) -> Case:
    how = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=preserve)
    return Case(Stack(lambda: mlp(0.2), how))


def batch_norm(checkpointed: bool) -> Case:
    return Case(Stack(lambda: mlp(norm=True), None if checkpointed else plain))


class Jitter(nn.Module):
    """Scales by a number of ``kind``'s generator."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(64, 64), kind
        self.generator = torch.Generator(torch.get_default_device()).manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "python":
            scale: Any = 1 + random.random()
        elif self.kind == "numpy":
            scale = 1 + float(numpy.random.rand())
        elif self.kind == "own":
            scale = 1 + torch.rand(1, generator=self.generator)
        else:
            scale = 1 + torch.rand(1)
        return torch.tanh(self.linear(x) * scale)


def jitter(kind: str) -> Case:
    return Case(Stack(lambda: Jitter(kind)))


def frozen_embeddings(reentrant: bool) -> Case:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    model._set_gradient_checkpointing(True, functools.partial(checkpoint, use_reentrant=reentrant))
    return Case(model, TOKENS)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.vision = nn.Linear(64, 64), mlp()

    def forward(self, text: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        return self.text(text) + (0 if image is None else self.vision(image))


def text_only(image: bool) -> Case:
    return Case(TwoTowers(), (ROWS, ROWS) if image else (ROWS,))


def shared_keys(reentrant: bool) -> Case:
    from transformers import AutoModelForCausalLM, Gemma4TextConfig

    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, global_head_dim=8, num_kv_shared_layers=2, vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    checkpointing_names.enable(model, {"use_reentrant": reentrant})
    return Case(model, TOKENS)


class Closure(nn.Module):
    """Layers that read the first layer's result past the checkpoint's arguments."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.reentrant = nn.Linear(64, 64), nn.Linear(64, 64), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.first(x)
        x = checkpoint(lambda y: torch.tanh(self.second(y) * keys), x + keys, use_reentrant=self.reentrant)
        return checkpoint(lambda y: torch.tanh(self.second(y) + keys), x, use_reentrant=self.reentrant)


class CachedAttention(nn.Module):
    def __init__(self, cached: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.cached = nn.Linear(64, 192), cached

    def attend(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if cache is not None:
            k, v = cache.update(k, v, 0)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from transformers import DynamicCache

        return checkpoint(self.attend, x, DynamicCache() if self.cached else None, use_reentrant=True)


def cached(on: bool) -> Case:
    return Case(CachedAttention(on), torch.randn(2, 8, 64, requires_grad=True))


class Router(nn.Module):
    """Sends rows to the second expert, from the second call on if ``counts``."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts, self.counts, self.calls = nn.ModuleList([nn.Linear(64, 64), mlp()]), counts, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        rows = len(x) // 2 if self.counts and self.calls > 1 else len(x) // 4
        return torch.cat([self.experts[0](x[:rows]), torch.tanh(self.experts[1](x[rows:]))])


def router(counts: bool) -> Case:
    return Case(Stack(lambda: Router(counts), layers=1))


class Residual(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dropout = dropout
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(torch.relu(layer(x)), self.dropout)
        return x


def compiled_dropout(budget: float, dropout: float = 0.3, backend: str = "aot_eager_decomp_partition") -> Case:
    import torch._functorch.config as functorch

    torch._dynamo.reset()
    model = Residual(dropout)
    model.compile(backend=backend)
    return Case(model, around=lambda: functorch.patch(activation_memory_budget=budget))


def compiled_by(wrap: Callable[[nn.Module], nn.Module]) -> Case:
    """A model of PyTorch's own modules, whose layers ``wrap`` makes or changes and ``compile()`` is called on."""
    torch._dynamo.reset()
    layers = [wrap(nn.Sequential(nn.Linear(64, 64), nn.ReLU())) for _ in range(2)]
    for layer in layers:
        layer.compile(backend="eager")
    return Case(nn.Sequential(*layers))


class Called(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def autocast_around_backward(around: bool) -> Case:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            return model(x).float().square().mean()

    case = Case(Stack(mlp, plain), step=step)
    case.around = (
        (lambda: torch.autocast(torch.get_default_device().type, torch.bfloat16)) if around else contextlib.nullcontext
    )
    return case


# -- on, but not on -----------------------------------------------------------------------------------------


def llama_case(layers: int = 4, *, on: bool = True, **settings: Any) -> Case:
    model = llama(layers, **settings)
    if on:
        checkpointing_names.enable(model)
    return Case(model, TOKENS)


def in_eval(wrong: bool) -> Case:
    case = llama_case()
    case.model.train(not wrong)
    return case


class Flagged(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.inner, self.reads, self.gradient_checkpointing = mlp(), reads, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads and self.gradient_checkpointing:
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)


def swallowed(wrong: bool) -> Case:
    model = llama()
    if wrong:
        checkpointing_names.enable(model, {"use_reentrant": False, "every_n_layers": 2})
    else:
        checkpointing_names.enable(model, {"use_reentrant": False}, every_n_layers=2)
    return Case(model, TOKENS)


def training_arguments(**settings: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir="o", use_cpu=True, report_to=[], **{word_in(TrainingArguments): True, **settings}
    )


def _options_name() -> str:
    from transformers import TrainingArguments

    return f"{word_in(TrainingArguments)}_kwargs"


def every_third(told: bool) -> Case:
    case = Case(llama(6), TOKENS)
    checkpointing_names.enable(case.model, every_n_layers=3)
    case.options["arguments"] = training_arguments(**({_options_name(): {"every_n_layers": 3}} if told else {}))
    return case


def generates(mended: bool) -> Case:
    """TRL's GRPO, which generates in every step."""
    from trl import GRPOConfig

    options = {"use_reentrant": False} if mended else {"use_reentrant": False, "every_n_layers": 2}
    case = Case(llama(), TOKENS)
    if mended:
        name = f"{checkpointing_names.word_of(case.model)}_enable"
        enable = getattr(case.model, name)
        setattr(case.model, name, lambda *_, **__: enable(options, every_n_layers=2))
    settings = {"output_dir": "o", "use_cpu": True, "report_to": [], "bf16": False}
    case.options["arguments"] = GRPOConfig(**settings, **{word_in(GRPOConfig): True, _options_name(): options})
    return case


def old_name(wrong: bool) -> Case:
    case = llama_case()
    arguments = case.options["arguments"] = training_arguments()
    if word_in(arguments) == OLD:
        pytest.skip("transformers before 5.23 has one name")
    name = "gradient_checkpointing_kwargs" if wrong else "activation_checkpointing_kwargs"
    setattr(arguments, name, {"use_reentrant": True})  # as trl's trainers do
    if not wrong:
        arguments.gradient_checkpointing_kwargs = arguments.activation_checkpointing_kwargs
    return case


def selective(op: Any) -> Case:
    def policy(ctx: Any, called: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if called in {op} else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return Case(Stack(mlp, functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)))


def wrapped_twice(reentrant: bool) -> Case:
    """Of two that are not reentrant the inner one costs nothing: the recomputation stops before it."""
    how = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    return Case(Stack(lambda: checkpoint_wrapper(mlp(), checkpoint_impl=how)))


def replicated(model: nn.Module, *, asked: bool = False, **settings: Any) -> Case:
    """In a process group of one."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    case = Case(DistributedDataParallel(model, **settings))
    if asked:
        case.around = lambda: environment("ACCELERATE_USE_FSDP", "true")
    return case


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    import os

    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


# -- waste --------------------------------------------------------------------------------------------------


def one_checkpoint(whole: bool) -> Case:
    """Around everything: backward makes all of it again at once."""
    if whole:
        return Case(Stack(lambda: nn.Sequential(*(mlp() for _ in range(6))), layers=1))
    return Case(Stack(mlp, layers=6))


def last_layer_trains(hooked: bool) -> Case:
    model = llama(8)
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    checkpointing_names.enable(model)
    if not hooked:
        model.disable_input_require_grads()
    return Case(model, TOKENS)


def large_vocabulary(large: bool) -> Case:
    return llama_case(2 if large else 4, vocab_size=4096 if large else 64)


def with_kv_cache(on: bool) -> Case:
    """Only the last layer trains: the others would store nothing."""
    model = llama(8, use_cache=on)
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    return Case(model, TOKENS)


def eager(on: bool) -> Case:
    model = llama(2)
    model.set_attn_implementation("eager" if on else "sdpa")
    ids = torch.randint(0, 64, (1, 256))
    return Case(model, {"input_ids": ids, "labels": ids})


class Recorder(nn.Module):
    def __init__(self, numbers: bool) -> None:
        super().__init__()
        self.inner, self.numbers, self.outputs = mlp(), numbers, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        self.outputs.append(float(x.detach().mean()) if self.numbers else x)
        return x


def frozen_with_gradients(wrong: bool) -> Case:
    model = Stack(mlp, plain)
    if wrong:
        model(ROWS).mean().backward()
    model.first.requires_grad_(False)
    return Case(model)


def incomplete_optimizer(wrong: bool) -> Case:
    model = Stack(mlp, plain)
    parameters = model.layers.parameters() if wrong else model.parameters()
    return Case(model, options={"optimizer": torch.optim.AdamW(parameters)})


def adapter_under_autocast(dtype: torch.dtype) -> Case:
    from peft import LoraConfig, get_peft_model

    model = llama()
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.to(dtype)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            return model(**batch).loss

    return Case(model, TOKENS, step)


def anomaly(on: bool) -> Case:
    return Case(Stack(mlp, plain), around=lambda: torch.autograd.set_detect_anomaly(on))


def data_with_gradient(on: bool) -> Case:
    return Case(Stack(mlp, plain), ROWS.clone().requires_grad_(on))


def end_stays_plain(plain_end: bool) -> Case:
    model = Stack(mlp)
    again = model.how
    model.how = lambda layer, x: (plain if plain_end and layer is model.layers[-1] else again)(layer, x)
    return Case(model, torch.randn(512, 64))


# -- risks --------------------------------------------------------------------------------------------------


def reentrant_in_ddp(reentrant: bool) -> Case:
    model = Stack(mlp, functools.partial(checkpoint, use_reentrant=reentrant))
    return replicated(model, find_unused_parameters=reentrant)


class RawKernel(torch.autograd.Function):
    """Writes its result behind the dispatcher's back, as a Triton kernel does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        memory_of(out)[...] = numpy.tanh(memory_of(x))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        return grad * (1 - out * out)


class Kernels(nn.Module):
    def __init__(self, raw: bool) -> None:
        super().__init__()
        self.linear, self.raw = nn.Linear(64, 64), raw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return RawKernel.apply(x) if self.raw else torch.tanh(x)


def quantised_preparation(unsaid: bool) -> Case:
    """What peft's ``prepare_model_for_kbit_training`` leaves behind."""
    model = llama()
    checkpointing_names.enable(model, {} if unsaid else {"use_reentrant": False})
    return Case(model, TOKENS)


class Partitioner:
    def __init__(self, uuid: str | None) -> None:
        self._uuid = uuid

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not called by this backend")

    def uuid(self) -> str | None:
        return self._uuid


def partitioned(uuid: str | None) -> Case:
    import torch._inductor.config as inductor

    model = Stack(mlp, plain)
    model.compile(backend="aot_eager")
    return Case(model, around=lambda: inductor.patch(custom_partitioner_fn=Partitioner(uuid)))


def fitted(under_a_plan: bool, budget: str = "60%") -> Case:
    """Without waiting for the plan, the second step still runs without one."""
    case = Case(Stack(mlp, plain))
    batch = torch.randn(256, 64)
    if under_a_plan:
        fit = lowtide.fit(case.model, (batch,), budget=budget)
    else:
        fit = lowtide.fit(case.model, budget=budget)
    case.model(batch).square().mean().backward()
    fit.status()
    case.options["fit"] = fit
    return case


def half_eval(wrong: bool) -> Case:
    model = Stack(lambda: mlp(0.1), plain)
    model.layers[1].train(not wrong)
    return Case(model)


SICK: dict[str, tuple[Callable[[], Case], Callable[[], Case]]] = {
    "LT001": (lambda: forgets_random_state(False), lambda: forgets_random_state(True)),
    "LT002": (lambda: batch_norm(True), lambda: batch_norm(False)),
    "LT003": (lambda: forgets_random_state(False), lambda: forgets_random_state(True)),
    "LT004": (lambda: jitter("own"), lambda: jitter("default")),
    "LT004 python": (lambda: jitter("python"), lambda: jitter("default")),
    "LT004 numpy": (lambda: jitter("numpy"), lambda: jitter("default")),
    "LT005": (lambda: frozen_embeddings(True), lambda: frozen_embeddings(False)),
    "LT006": (lambda: text_only(False), lambda: text_only(True)),
    "LT007": (lambda: shared_keys(True), lambda: shared_keys(False)),
    "LT007 closure": (lambda: Case(Closure(True)), lambda: Case(Closure(False))),
    "LT008": (lambda: cached(True), lambda: cached(False)),
    "LT009": (lambda: router(True), lambda: router(False)),
    "LT010": (lambda: compiled_dropout(0.1), lambda: compiled_dropout(1.0)),
    "LT010 without dropout": (lambda: compiled_dropout(0.1), lambda: compiled_dropout(0.1, dropout=0.0)),
    "LT011": (lambda: autocast_around_backward(True), lambda: autocast_around_backward(False)),
    "LT101": (lambda: in_eval(True), lambda: in_eval(False)),
    "LT102": (lambda: Case(Flagged(False)), lambda: Case(Flagged(True))),
    "LT103": (lambda: swallowed(True), lambda: swallowed(False)),
    "LT104": (lambda: every_third(False), lambda: every_third(True)),
    "LT105": (lambda: old_name(True), lambda: old_name(False)),
    "LT106": (lambda: selective(torch.ops.aten.addmm), lambda: selective(torch.ops.aten.addmm.default)),
    "LT107": (lambda: wrapped_twice(True), lambda: wrapped_twice(False)),
    "LT108": (lambda: replicated(Stack(mlp, plain), asked=True), lambda: replicated(Stack(mlp, plain))),
    "LT110": (lambda: generates(False), lambda: generates(True)),
    "LT201": (lambda: one_checkpoint(True), lambda: one_checkpoint(False)),
    "LT202": (lambda: last_layer_trains(True), lambda: last_layer_trains(False)),
    "LT203": (lambda: end_stays_plain(False), lambda: end_stays_plain(True)),
    "LT204": (lambda: large_vocabulary(True), lambda: large_vocabulary(False)),
    "LT205": (lambda: with_kv_cache(True), lambda: with_kv_cache(False)),
    "LT206": (lambda: eager(True), lambda: eager(False)),
    "LT207": (lambda: Case(Recorder(False)), lambda: Case(Recorder(True))),
    "LT208": (lambda: frozen_with_gradients(True), lambda: frozen_with_gradients(False)),
    "LT209": (lambda: incomplete_optimizer(True), lambda: incomplete_optimizer(False)),
    "LT210": (lambda: adapter_under_autocast(torch.float32), lambda: adapter_under_autocast(torch.bfloat16)),
    "LT211": (
        lambda: replicated(Stack(mlp, plain), find_unused_parameters=True), lambda: replicated(Stack(mlp, plain)),
    ),
    "LT212": (lambda: anomaly(True), lambda: anomaly(False)),
    "LT213": (lambda: data_with_gradient(True), lambda: data_with_gradient(False)),
    "LT214": (lambda: compiled_by(lambda layer: layer), lambda: compiled_by(Called)),
    "LT301": (lambda: reentrant_in_ddp(True), lambda: reentrant_in_ddp(False)),
    "LT302": (lambda: Case(Kernels(True)), lambda: Case(Kernels(False))),
    "LT303": (lambda: fitted(False), lambda: fitted(True)),
    "LT304": (lambda: quantised_preparation(True), lambda: quantised_preparation(False)),
    "LT305": (lambda: partitioned(None), lambda: partitioned("a plan")),
    "LT306": (lambda: half_eval(True), lambda: half_eval(False)),
    "LT307": (lambda: Case(Stack(lambda: checkpoint_wrapper(mlp()), plain)), lambda: Case(Stack(mlp))),
}  # fmt: skip
