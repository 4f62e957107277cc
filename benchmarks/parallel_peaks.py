"""Peaks foreseen for one of several ranks beside peaks that real ranks measure: gloo, on this CPU.

    cd benchmarks
    python parallel_peaks.py           all cases; some minutes of two cores
    python parallel_peaks.py --only mixtral

Tensor and expert parallel models are made by ``from_pretrained(distributed_config=...)`` from a small model that was
saved, without lowtide. Sequence parallel ones and stages of pipelines, which transformers does not train, are wrapped
as lowtide does it and run on real tensors; stages send and receive in the order of 1F1B. One JSON line for each case.

Predictions take each expert to be chosen equally often. Expert parallel ranks are measured as their routers choose, and
again with choices that are balanced ("balanced"): the second compares the bytes, the first shows what imbalance adds.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from provenance import HERE, provenance

import lowtide
from lowtide.estimation.device_table import device_named
from lowtide.foresight import parallel_model
from lowtide.foresight.named_subjects import subject_named
from lowtide.foresight.pipeline import waiting_bytes
from lowtide.foresight.rank_memory import rank_memory
from lowtide.foresight.subjects import Subject
from lowtide.foresight.training_setup import PRECISIONS as TYPES
from lowtide.foresight.training_setup import TrainingSetup
from lowtide.graph.costs import Costs

WORLD = 2
Job = tuple[str, str, tuple[int, int]]  # way, precision, rows and tokens
RESULTS = HERE / "results" / "parallel_peaks_cpu.jsonl"
BASE = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 512, "use_cache": False,
        "tie_word_embeddings": False}  # fmt: skip
MODELS = {
    "llama": BASE | {"model_type": "llama"},
    "llama, tied": BASE | {"model_type": "llama", "tie_word_embeddings": True},
    "mixtral": BASE | {"model_type": "mixtral", "intermediate_size": 256, "num_local_experts": 4},
}
WAYS: dict[str, dict[str, Any]] = {
    "tensor 2": {"tensor_parallel": 2},
    "tensor 2, sequence": {"tensor_parallel": 2, "sequence_parallel": True},
    "expert 2": {"expert_parallel": 2, "data_parallel": 2},
    "expert 2, balanced": {"expert_parallel": 2, "data_parallel": 2},
    "expert 2, tensor 2": {"expert_parallel": 2, "tensor_parallel": 2},
    "expert 2, tensor 2, balanced": {"expert_parallel": 2, "tensor_parallel": 2},
    "pipeline 2, 4 micro-batches": {"pipeline_parallel": 2, "accumulate": 4},
}
PRECISIONS = ("fp32", "bf16-mixed", "bf16")
SHAPES = ((4, 128),)
STEPS = 8


def jobs_of(model: str) -> list[Job]:
    ways = [way for way in WAYS if "expert" not in way or "num_local_experts" in MODELS[model]]
    return [(way, precision, shape) for way in ways for precision in PRECISIONS for shape in SHAPES]


@cache
def foreseen(path: str, way: str, precision: str, shape: tuple[int, int], stage: int) -> tuple[int, int]:
    """Bytes of one rank: at the peak, and before the step."""
    setup = TrainingSetup(
        device_named("cpu"), batch_size=shape[0], seq_len=shape[1], precision=precision, optimizer="none", **WAYS[way]
    )
    if setup.pipeline_parallel > 1:
        setup = replace(setup, stage=stage)
    subject = _subject(path)
    graph, facts = subject.trace(setup), subject.facts(setup)
    costs = Costs(tuple(0.01 for _ in graph.ops))
    plan = lowtide.solve(graph, costs, method="none")
    waiting = waiting_bytes(graph, lowtide.simulate(graph, costs, plan).live_bytes)
    above = plan.predicted_peak_bytes - graph.resident_bytes + (setup.micro_batches_in_flight - 1) * waiting
    resident = rank_memory(facts, setup)
    held = resident.parameters + resident.gradients + resident.buffers + graph.resident["batch"]
    received = graph.resident["batch"] - 8 * shape[0] * shape[1] if stage else 0  # comes with each micro-batch
    return held + above, held - received


@cache
def _subject(path: str) -> Subject:
    return subject_named(path)


def _model(path: str, options: dict, precision: str) -> torch.nn.Module:
    """One real rank's model, of one dtype."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    dtype = getattr(torch, TYPES[precision][0])
    setup = TrainingSetup(device_named("cpu"), precision=precision, **options)
    if setup.sequence_parallel or setup.pipeline_parallel > 1:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        parallel_model.wrap(model, replace(setup, stage=dist.get_rank() if setup.pipeline_parallel > 1 else None))
        return model.train()
    tensor, experts = setup.tensor_parallel, setup.expert_parallel
    if tensor == 1:  # transformers would divide what is replicated here by FSDP
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        parallel_model.wrap(model, setup)
        return model.train()
    config = DistributedConfig(tp_size=tensor, ep_size=experts)
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, distributed_config=config).train()


def _step(model: torch.nn.Module, batch: dict, precision: str, options: dict) -> Any:
    """One optimizer's step but the optimizer."""
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision.endswith("mixed"))
    if "pipeline_parallel" in options:
        return lambda: _pipeline_step(model, batch, autocast, options["accumulate"])

    def step() -> None:
        output = model(**batch)  # held until backward ends, as for a trace of the model itself
        output.loss.backward()

    def autocast_step() -> None:
        with autocast:
            loss = model(**batch).loss
        loss.backward()

    return autocast_step if precision.endswith("mixed") else step


def _pipeline_step(model: Any, batch: dict, autocast: Any, count: int) -> None:
    """Two stages in the order of 1F1B; what is sent and what is received together waits together, or both would."""
    dtype, shape = next(model.parameters()).dtype, (*batch["input_ids"].shape, model.config.hidden_size)

    def exchange(sent: torch.Tensor | None, *, receive: bool = True) -> Any:
        peer, received = 1 - dist.get_rank(), torch.empty(shape, dtype=dtype) if receive else None
        works = [] if sent is None else [dist.isend(sent, peer)]
        works += [] if received is None else [dist.irecv(received, peer)]
        for work in works:
            work.wait()
        return received

    if dist.get_rank() == 0:
        waiting: list[torch.Tensor] = []
        for i in range(count):
            with autocast:
                waiting.append(model.base_model(input_ids=batch["input_ids"]).last_hidden_state)
            gradient = exchange(waiting[-1].detach(), receive=i > 0)
            if i > 0:
                waiting.pop(0).backward(gradient)
            del gradient
        waiting.pop(0).backward(exchange(None))
        return
    received = exchange(None)
    for i in range(count):
        received.requires_grad_()
        with autocast:
            loss = model(inputs_embeds=received, labels=batch["labels"]).loss
        loss.backward()
        received = exchange(received.grad, receive=i + 1 < count)


def _rank(rank: int, path: str, jobs: list[Job], end: Any) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{path}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank)}
    end.put((rank, [_measured(path, *job) for job in jobs]))
    dist.barrier()
    dist.destroy_process_group()


def _measured(path: str, way: str, precision: str, shape: tuple[int, int]) -> tuple[int, int]:
    """(bytes before the step, peak above them) of this rank; the least of some steps, as gloo's threads free late."""
    from lowtide.measurement.allocator import peak_bytes
    from lowtide.step.subclasses import plain_tensors

    model = _model(path, WAYS[way], precision)
    ids = torch.randint(0, BASE["vocab_size"], shape, generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if "pipeline_parallel" in WAYS[way]:  # tokens for the first stage, labels for the last
        given = {"input_ids": ids} if dist.get_rank() == 0 else {"labels": ids}
    else:
        given = batch
    step, peaks = _step(model, batch, precision, WAYS[way]), []
    with _balanced() if way.endswith("balanced") else nullcontext():
        for _ in range(1 + STEPS):
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.zero_()
            dist.barrier()
            peaks.append(peak_bytes(step))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    tensors = plain_tensors(*model.parameters(), *gradients, *model.buffers(), *given.values())
    # Not storages: on a CPU, a loaded part is a view of the file.
    held = {t.data_ptr(): t.nbytes for t in tensors}
    return sum(held.values()), min(peaks[1:])


def _balanced() -> AbstractContextManager:
    """Inside, routers choose each expert equally often; their gradients are wrong, and as large as before."""
    topk = torch.topk

    def balanced(probabilities: torch.Tensor, k: int, dim: int = -1) -> Any:
        rows, experts = probabilities.shape
        chosen = torch.arange(rows * k).remainder_(experts).view(rows, k)
        probabilities.data.scatter_(dim, chosen, 1.0)  # autograd saves the probabilities: overwritten, not copied
        return topk(probabilities, k, dim=dim)

    return patch.object(torch, "topk", balanced)


def lines(model: str, jobs: list[Job]) -> Iterator[dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as path:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**dict(MODELS[model]))).save_pretrained(path)
        context = mp.get_context("spawn")
        end: Any = context.SimpleQueue()
        ranks = [context.Process(target=_rank, args=(rank, path, jobs, end)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        told = [found for _, found in sorted(end.get() for _ in ranks)]
        for process in ranks:
            process.join()
        for job, *by_rank in zip(jobs, *told, strict=True):
            for rank, (resident, above) in enumerate(by_rank):
                peak, before = foreseen(path, *job, rank if "pipeline_parallel" in WAYS[job[0]] else 0)
                yield {
                    "model": model, "way": job[0], "precision": job[1], "shape": list(job[2]), "rank": rank,
                    "predicted_peak_bytes": peak, "measured_peak_bytes": resident + above,
                    "predicted_before_bytes": before, "measured_before_bytes": resident,
                    "error": round(peak / (resident + above) - 1, 6),
                    "error_of_step": round((peak - before) / above - 1, 6),
                }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a model; printed, not written")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    shared, written = provenance(), []
    for model in MODELS:
        if args.only in (None, model):
            for line in lines(model, jobs_of(model)):
                text = json.dumps({"benchmark": "parallel_peaks_cpu", **line, **shared})
                print(text, flush=True)
                written.append(text + "\n")
    if not args.only:
        RESULTS.write_text("".join(written))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
