"""Sequence parallelism on top of transformers' tensor parallel plan.

Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, section 4.2.2. Between attention and MLP each rank holds a
part of the tokens: norms, residuals and their gradients. What runs on all tokens gathers them before, once for all its
columns, and the sums of its rows are scattered. transformers has styles for this and reserves the setting; its plans
do not use them, so the places are found here: the embedding, and the children of each numbered layer.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from lowtide.foresight.training_setup import SetupError

_TOKENS = 1  # dimension
_CHILD_OF_A_LAYER = re.compile(r"^.*\.\d+\.[^.]+$")
_TAKES_WHOLE = ("colwise", "rowwise", "replicated_with_grad_allreduce")  # columns take all tokens as one DTensor


def apply(model: Any, mesh: Any, plan: dict[str, str]) -> None:
    """Divide ``model`` by ``plan`` on ``mesh``, and the tokens between its parts.

    Raises:
        SetupError: it is not built of an embedding, numbered layers, norms, attention and MLPs.
    """
    from torch.distributed.tensor import Shard
    from transformers.distributed.tensor_parallel import (
        RowwiseParallel,
        SequenceParallel,
        apply_tensor_parallelism,
    )

    modules = dict(model.named_modules())
    children = [
        name for name in modules if _CHILD_OF_A_LAYER.match(name) and any(True for _ in modules[name].parameters())
    ]
    norms = [name for name, m in modules.items() if _is_norm(m) and (name in children or name.count(".") < 2)]
    blocks = [name for name in children if name not in norms]
    embedding = next((name for name, m in modules.items() if m is model.get_input_embeddings()), "")
    is_here = not isinstance(modules[embedding], nn.Identity)  # not on another stage of a pipeline
    if (is_here and plan.get(embedding) != "embedding_rowwise") or not norms or not blocks:
        raise SetupError(
            "--sequence-parallel needs a model of an embedding, numbered layers, norms, attention and MLPs, whose "
            "embedding transformers divides. Leave it out."
        )
    whole = {block: not _is_columns_and_rows(modules[block], block, plan) for block in blocks}
    ends = [n for n, style in plan.items() if style == "rowwise" and not whole.get(n.rpartition(".")[0], True)]
    own = ({embedding: _split_tokens()} if is_here else {}) | dict.fromkeys(
        ends, RowwiseParallel(output_layouts=Shard(_TOKENS), use_local_output=False)
    )
    apply_tensor_parallelism(
        model, mesh, {n: s for n, s in plan.items() if n not in own and n.rpartition(".")[0] not in own}
    )
    for name, style in own.items():
        for parameter, _ in list(modules[name].named_parameters(recurse=False)):
            style.shard_param(modules[name], parameter, mesh)
        style.install_forward(modules[name], mesh)
    getattr(model, model.base_model_prefix).register_forward_pre_hook(_received_parts(mesh), with_kwargs=True)
    for name in norms:
        SequenceParallel(sequence_dim=_TOKENS, use_local_output=False).install_forward(modules[name], mesh)
    for name in blocks:
        _gather_tokens(to_plain=whole[name]).install_forward(modules[name], mesh)


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__


def _is_columns_and_rows(block: nn.Module, path: str, plan: dict[str, str]) -> bool:
    """Whether every layer inside is divided; a router, say, wants plain tensors."""
    owners = [n for n, m in block.named_modules() if any(True for _ in m.parameters(recurse=False))]
    return all(plan.get(f"{path}.{name}") in _TAKES_WHOLE for name in owners)


def _received_parts(mesh: Any) -> Any:
    """Activations from another stage are a part of the tokens."""
    from torch.distributed.tensor import DTensor, Shard

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        received = kwargs.get("inputs_embeds")
        if received is not None:
            kwargs = kwargs | {"inputs_embeds": DTensor.from_local(received, mesh, [Shard(_TOKENS)], run_check=False)}
        return args, kwargs

    return hook


def _split_tokens() -> Any:
    from torch.distributed.tensor import DTensor, Partial, Shard
    from transformers.distributed.tensor_parallel import EmbeddingParallel

    class SplitTokens(EmbeddingParallel):
        """What ranks found of each token in their part of the vocabulary: summed, and scattered along the tokens."""

        def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
            if not isinstance(output, DTensor):
                output = DTensor.from_local(output, mesh, [Partial()], run_check=False)
            return output.redistribute(placements=[Shard(_TOKENS)])

    return SplitTokens()


def _gather_tokens(*, to_plain: bool) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from transformers.distributed.tensor_parallel import TensorParallelLayer

    class GatherTokens(TensorParallelLayer):
        """All tokens in, a part of them out."""

        def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
            def gathered(x: Any) -> Any:
                if not isinstance(x, DTensor) or x.placements != (Shard(_TOKENS),):
                    return x
                x = x.redistribute(placements=[Replicate()])
                return x.to_local() if to_plain else x

            return tuple(map(gathered, args)), {name: gathered(value) for name, value in kwargs.items()}

        def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
            first, *rest = output if isinstance(output, tuple) else (output,)
            if not isinstance(first, DTensor):
                first = DTensor.from_local(first, mesh, [Replicate()], run_check=False)
            first = first.redistribute(placements=[Shard(_TOKENS)])
            return (first, *rest) if isinstance(output, tuple) else first

    return GatherTokens()
