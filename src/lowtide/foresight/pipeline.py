"""What one stage of a pipeline runs in training, and what it holds while other stages work.

One forward, one backward in turn (1F1B: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2). A stage
receives activations, and holds them with what its backward needs; then it receives a gradient. Beside the micro-batch
that runs, it holds those that wait for their backward: each as much as is there when its forward has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide.graph.step_graph import RUN, StepGraph
from lowtide.hollow.ranks import is_shared

_RECEIVED = "inputs_embeds"
_FOR_THE_HEAD = "labels"


class _Sent(torch.autograd.Function):
    """A stage's output goes to the next stage, and a gradient as large comes from there; it is held until then."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.output = output  # backward begins at it
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> torch.Tensor:
        return torch.empty(ctx.output.shape, dtype=ctx.output.dtype)


def stage_batch(
    batch: dict[str, torch.Tensor], stage: int, stages: int, received: tuple[int, ...], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """What of ``batch`` a stage is given, and the activations that it receives, on ``meta``."""
    if stage:
        found = {_RECEIVED: torch.empty(received, dtype=dtype, device="meta", requires_grad=True)}
    else:
        found = {"input_ids": batch["input_ids"]}
    return found | ({_FOR_THE_HEAD: batch[_FOR_THE_HEAD]} if stage == stages - 1 else {})


def stage_step(model: nn.Module, batch: Any) -> torch.Tensor:
    """Forward of one micro-batch: the loss on the last stage, else a number whose backward receives a gradient."""
    if _FOR_THE_HEAD in batch:
        loss: torch.Tensor = model(**batch).loss
        return loss
    base: Callable[..., Any] = getattr(model, str(model.base_model_prefix))
    output = base(**batch).last_hidden_state
    sent: torch.Tensor = _Sent.apply(output.to_local() if is_shared(output) else output)
    return sent


def waiting_bytes(graph: StepGraph, live_bytes: tuple[int, ...]) -> int:
    """What one micro-batch that waits for its backward holds: its batch, and what is there when forward has ended.

    Args:
        live_bytes: After each event of ``graph``, under a plan.
    """
    first = next(
        (i for i, (kind, op) in enumerate(graph.events) if kind == RUN and graph.ops[op].backward), len(live_bytes)
    )
    before = live_bytes[first - 1] if first else graph.start_bytes
    return before - graph.start_bytes + graph.resident["batch"]


def layers_of(stage: int, stages: int, layers: int) -> range:
    """The layers of a stage, as the installed transformers divides them.

    Evenly; what is left goes to the last stage up to 5.23, and one each to the first ones from 5.24 on.
    """
    from transformers.distributed.pipeline_parallel import PipelineStage

    asked = object.__new__(PipelineStage)  # of no group of processes
    asked.pp_size = stages
    return range(*asked.layer_range_for_rank(stage, layers))
