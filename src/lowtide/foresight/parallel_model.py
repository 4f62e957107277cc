"""A model as one of many ranks has it, wrapped by transformers' own code on a group that sends nothing.

    tensor     ``base_model_tp_plan`` of the configuration: columns and rows of linear layers as DTensors, embedding and
               head divided along the vocabulary, logits gathered.
    expert     ``base_model_ep_plan``: whole experts on each rank, tokens brought there by all-to-all. Each rank is
               taken to choose experts as this one does.
    pipeline   Layers divided evenly, as far as they go; embedding on the first stage, head on the last. (Its own
               forward is for inference: what a stage runs in training is in ``pipeline.py``.)

Sequence parallelism is reserved in transformers and wired nowhere: ``sequence_parallel.py`` adds it to the tensor plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.errors import LowtideError
from lowtide.foresight import sequence_parallel
from lowtide.foresight.training_setup import SetupError, TrainingSetup
from lowtide.hollow.ranks import fake_ranks, is_shared

_HEADS = ("num_attention_heads", "num_key_value_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def is_divided(setup: TrainingSetup) -> bool:
    """Whether a rank has a part of the model's code to run."""
    return max(setup.tensor_parallel, setup.expert_parallel, setup.pipeline_parallel) > 1


@contextmanager
def one_rank(name: str, setup: TrainingSetup) -> Iterator[None]:
    """Inside, this process is a rank of the stage that is asked about, among those that run the same micro-batch.

    Raises:
        SetupError: something inside failed that is no error of lowtide's: what transformers or DTensor cannot do.
    """
    if not is_divided(setup):
        yield
        return
    each = _of_a_stage(setup)
    with fake_ranks(setup.pipeline_parallel * each, (setup.stage or 0) * each):
        try:
            yield
        except LowtideError:
            raise
        except Exception as error:
            import transformers

            raise SetupError(
                f"transformers {transformers.__version__} and torch {torch.__version__} cannot run {name} with "
                f"{_degrees(setup)}: {type(error).__name__}: {error}\nPass other degrees, or none."
            ) from error


def check(name: str, text: Any, setup: TrainingSetup) -> None:
    """Raises: SetupError: the sizes of configuration ``text`` cannot be divided so, or transformers has no plan."""
    if setup.tensor_parallel > 1:
        _check_tensor(name, text, setup.tensor_parallel)
    if setup.sequence_parallel:
        _check_tokens(setup)
    if setup.expert_parallel > 1:
        _check_experts(name, text, setup.expert_parallel)
    if setup.pipeline_parallel > 1:
        _check_stages(name, text, setup.pipeline_parallel)


def wrap(model: Any, setup: TrainingSetup) -> None:
    """Leave of ``model`` what one rank has; to be called in ``one_rank`` and under a ``HollowMode``.

    Raises:
        SetupError: transformers cannot, or is too old.
    """
    tensor, experts, stages, each = (
        setup.tensor_parallel, setup.expert_parallel, setup.pipeline_parallel, _of_a_stage(setup)
    )  # fmt: skip
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.expert_parallel import apply_expert_parallelism
        from transformers.distributed.pipeline_parallel import apply_pipeline_parallelism
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        resolve = model._resolve_parallel_plans
    except (ImportError, AttributeError):
        import transformers

        raise SetupError(
            f"transformers {transformers.__version__} does not divide models as lowtide expects. Install 5.23 or 5.24."
        ) from None
    dense = init_device_mesh("cpu", (stages, each // tensor, tensor), mesh_dim_names=("pp", "fsdp", "tp"))
    if stages > 1:
        apply_pipeline_parallelism(model, dense["pp"])
        del model.forward  # theirs receives and sends without gradients
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = getattr(head, "weight", None) is not None and head.weight is getattr(embedding, "weight", None)
    if tied:  # transformers divides both before it ties them
        head.weight = nn.Parameter(torch.empty_like(head.weight))
    asked = DistributedConfig(tp_size=tensor, fsdp_size=each // tensor, ep_size=experts)
    tensor_plan, expert_plan, _ = resolve(asked)
    tensor_plan = _of_this_stage(model, tensor_plan)
    if setup.chunk_loss:
        tensor_plan = _without_head(model, tensor_plan, tied=tied)
    if tensor > 1 and setup.sequence_parallel:
        sequence_parallel.apply(model, dense["tp"], tensor_plan)
    elif tensor > 1:
        apply_tensor_parallelism(model, dense["tp"], tensor_plan)
    if experts > 1:
        owners = init_device_mesh("cpu", (stages, each // experts, experts), mesh_dim_names=("pp", "efsdp", "ep"))
        apply_expert_parallelism(model, owners["ep"], dense["tp"], expert_plan)
    if tied:
        head.weight = embedding.weight


def expert_names(model: Any) -> set[str]:
    """Parameters that expert parallel ranks divide among themselves."""
    names = [n for n, style in (getattr(model, "ep_plan", None) or {}).items() if style == "grouped_gemm"]
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    return {n for n, _ in model.named_parameters() if replace_layer_number_by_wildcard(n) in names}


def whole_gradients(model: Any, setup: TrainingSetup) -> dict[str, int]:
    """Elements of gradients that are larger than this rank's part of the parameter.

    DTensor leaves that of an embedding divided along the vocabulary whole on each rank. It is asked: embedding and head
    alone run forward and backward.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(embedding, nn.Identity) or not embedding.weight.requires_grad:
        return {}
    output = embedding(torch.zeros(1, setup.tensor_parallel, dtype=torch.int64))
    if head is not None and getattr(head, "weight", None) is embedding.weight and not setup.chunk_loss:
        output = head(output)
    (output.to_local() if is_shared(output) else output).sum().backward()
    gradient = embedding.weight.grad
    embedding.weight.grad = None
    local = gradient._local_tensor if is_shared(gradient) else gradient
    return {name: local.numel() for name, p in model.named_parameters() if p is embedding.weight}


def _degrees(setup: TrainingSetup) -> str:
    """As they are passed."""
    asked = [
        f"--{name.replace('_', '-')} {degree}"
        for name in ("tensor_parallel", "expert_parallel", "pipeline_parallel")
        if (degree := getattr(setup, name)) > 1
    ]
    return " ".join([*asked, *(["--sequence-parallel"] if setup.sequence_parallel else [])])


def _of_a_stage(setup: TrainingSetup) -> int:
    return max(setup.tensor_parallel, setup.expert_parallel)


def _of_this_stage(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """Without what is on other stages: identities stand there, which transformers tries to divide as well."""
    others = {name for name, module in model.named_modules() if isinstance(module, nn.Identity)}
    return {name: style for name, style in plan.items() if name not in others}


def _without_head(model: Any, plan: dict[str, str], *, tied: bool) -> dict[str, str]:
    """Chunks of the loss need the head whole, and with it an embedding that is tied to it."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    whole = {id(head)} | ({id(embedding)} if tied else set())
    names = {name for name, module in model.named_modules() if id(module) in whole}
    return {name: s for name, s in plan.items() if name not in names and name.rpartition(".")[0] not in names}


def _check_tensor(name: str, text: Any, degree: int) -> None:
    if not getattr(text, "base_model_tp_plan", None):
        raise SetupError(f"--tensor-parallel {degree}: transformers has no plan to split {name}.")
    for field in _HEADS:
        _check_divides("--tensor-parallel", degree, getattr(text, field, None), field.removeprefix("num_"), name)


def _check_tokens(setup: TrainingSetup) -> None:
    if setup.seq_len % setup.tensor_parallel:
        raise SetupError(
            f"--sequence-parallel: --tensor-parallel {setup.tensor_parallel} does not divide --seq-len "
            f"{setup.seq_len}. Pass a multiple."
        )


def _check_experts(name: str, text: Any, degree: int) -> None:
    if not getattr(text, "base_model_ep_plan", None):
        raise SetupError(f"--expert-parallel {degree}: transformers has no plan to divide experts of {name}.")
    count = next((c for field in _EXPERTS if isinstance(c := getattr(text, field, None), int)), None)
    _check_divides("--expert-parallel", degree, count, "experts", name)


def _check_stages(name: str, text: Any, stages: int) -> None:
    if not getattr(text, "base_model_pp_plan", None):
        raise SetupError(f"--pipeline-parallel {stages}: transformers has no plan to cut {name} into stages.")
    if stages > text.num_hidden_layers:
        raise SetupError(
            f"--pipeline-parallel {stages} is more stages than the {text.num_hidden_layers} layers of {name}. "
            f"Pass {text.num_hidden_layers} or fewer."
        )


def _check_divides(option: str, degree: int, count: int | None, what: str, name: str) -> None:
    if count is None or not count % degree:
        return
    known = [str(d) for d in range(2, count + 1) if not count % d]
    way = f"Use one of {', '.join(known)}." if known else "Leave it out."
    raise SetupError(f"{option} {degree} does not divide the {count} {what} of {name}. {way}")
