"""What one rank holds through the whole step, by exact arithmetic on the shapes of the real parameters.

    none    A replica: everything, and buckets as large as the gradients that others have too (DistributedDataParallel's
            default).
    zero1   The optimizer's part is of one flat vector, divided by the ranks (DeepSpeed, Rajbhandari et al. 2020,
            https://arxiv.org/abs/1910.02054). zero2: the gradients' too, beside one bucket that is being reduced.
    zero3   The parameters' too, beside what is gathered at a time: DeepSpeed's defaults, 1e9 elements and a prefetch
            bucket of 5e8.
    fsdp    FSDP2: each parameter is divided along its first dimension and padded there. Each numbered block
            (``layers.3``) is a unit, and what is left is the root, gathered through the whole step with its gradients.
            Beside it: the unit that runs and the next one, the gradients of one and what is being reduced of another.
            Under a ``MixedPrecisionPolicy`` what is gathered is in its dtype, and reduced in float32. Without
            resharding after forward, all units stay gathered until backward has passed them.
            Experts that no other rank has are units of their own, which FSDP2 copies instead of gathering them.

What tensor, expert and pipeline parallel ranks hold is what transformers' wrapping leaves of the model on one of them
(``parallel_model.py``); the rules above divide that. Experts have fewer replicas than the rest: the ranks that divide
them are taken out of those that divide the data.

The optimizer's own ``step()`` runs on hollow parameters of these sizes (``hollow/optimizer.py``). Quantised layers take
4 bits an element, and 0.127 bits for their scales (double quantisation: Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314). ``adamw_8bit`` is arithmetic: two states of a byte an element, a scale of 4 bytes for
each 256, none for parameters below 4096 elements, which stay in float32 (Dettmers et al. 2021,
https://arxiv.org/abs/2110.02861).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from lowtide.foresight.subjects import Facts, Parameter
from lowtide.foresight.training_setup import PRECISIONS, TrainingSetup
from lowtide.hollow.devices import TargetDevice, target_of
from lowtide.hollow.memory import hollow
from lowtide.hollow.mode import HollowMode
from lowtide.hollow.optimizer import hollow_optimizer_bytes
from lowtide.step.optimizer_state import NAMED

_BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's reduce_bucket_size, and stage3_prefetch_bucket_size
_LIVE_ELEMENTS = 1_000_000_000  # stage3_max_live_parameters
_QUANTIZED_BYTES = (4 + 0.127) / 8
_SCALED_ELEMENTS, _LEAST_QUANTIZED = 256, 4096
_UNIT = re.compile(r"^(.*?\.\d+)\.")
_GATHERED_BYTES = 2  # an element in a 16-bit compute dtype
_RUN_BLOCKS = 2
_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict]] = {**NAMED, "muon": (torch.optim.Muon, {})}


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, beside what the step itself makes.

    Attributes:
        gathered: Parts of other ranks that are here at a time, buckets, and what of them is on its way.
        optimizer_step: Temporaries of ``optimizer.step()``, when activations are gone; in backward, of the largest
            parameter's, with its gradient.
        step_share: Of a gradient's bytes, what the optimizer takes beside it when it steps in backward.
        host: In host memory, for each rank.
        rule: How it was divided, in words.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    gathered: int
    optimizer_step: int
    host: int
    rule: str
    step_share: float = 0.0

    @cached_property
    def resident_bytes(self) -> int:
        """Through forward and backward."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.gathered


def rank_memory(facts: Facts, setup: TrainingSetup) -> RankMemory:
    """Return what the rank that holds most keeps under ``setup``."""
    count, kind = setup.data_parallel, setup.sharding
    trained = [p for p in facts.parameters if p.trains]
    whole = sum(map(parameter_bytes, facts.parameters))
    gradients = sum(p.gradient_bytes for p in trained)
    sharded = count > 1 and kind in ("zero3", "fsdp")
    held = [_shard(p, replicas(p, setup), kind) for p in facts.parameters] if sharded else list(facts.parameters)
    parameters = sum(map(parameter_bytes, held))
    state, step = _optimizer_bytes([p for p in held if p.trains], setup, is_divided=not sharded and kind != "none")
    gathered, host = 0, 0
    rule = "one device holds everything" if count == 1 else f"{count} data parallel ranks"
    divided = _divided_words(setup)
    rule = "; ".join([*divided, *([rule] if count > 1 or not divided else [])])
    if count > 1:
        reduced = sum(p.gradient_bytes for p in trained if replicas(p, setup) > 1)
        bucket = min(_BUCKET_ELEMENTS * max((p.itemsize for p in trained), default=0), reduced)
        if kind == "none":
            own = " but those of experts, which no other rank has" if reduced < gradients else ""
            gathered, rule = reduced, f"{rule}, replicas, with buckets as large as the gradients{own}"
        elif kind in ("zero1", "zero2"):
            gathered, rule = bucket, f"{rule}; the optimizer's state is divided by {count}"
            if kind == "zero2":
                by_replicas = _by_replicas(trained, setup)
                gradients = sum(math.ceil(sum(p.gradient_bytes for p in ps) / n) for n, ps in by_replicas.items())
                rule = f"{rule}, the gradients too"
            if experts := [n for p in trained if p.expert and (n := replicas(p, setup)) != count]:
                rule = f"{rule}, of experts by {experts[0]}"
        elif kind == "zero3":
            live = max((p.itemsize for p in facts.parameters), default=0) * (_LIVE_ELEMENTS + _BUCKET_ELEMENTS)
            gradients = sum(p.elements * p.itemsize for p in held if p.trains)
            gathered = min(live, whole) + bucket
            rule = f"{rule}; everything is divided by {count}, as DeepSpeed's defaults have it"
        else:
            gradients = sum(p.elements * p.itemsize for p in held if p.trains)
            gathered, units = _gathered_by_fsdp(facts.parameters, setup)
            rule = f"{rule}; everything is divided by {count} along first dimensions, {units} blocks are units"
            if not setup.reshard:
                rule += " that stay gathered after forward"
    if setup.offload_optimizer:
        host, state, step = state + gradients, 0, 0
        rule += "; the optimizer and its step are on the host"
    share = 0.0
    if setup.optimizer_in_backward and trained:
        largest = max(trained, key=lambda p: p.gradient_bytes)
        _, alone = _optimizer_bytes([largest], setup, is_divided=False)
        share = alone / largest.gradient_bytes
        gradients, step = 0, alone + largest.gradient_bytes
        rule += "; the optimizer steps in backward, one gradient at a time: no clipping by the global norm"
    return RankMemory(parameters, gradients, state, facts.buffer_bytes, gathered, step, host, rule, share)


def replicas(parameter: Parameter, setup: TrainingSetup) -> int:
    """How many ranks have the same part of it, and may divide that among themselves."""
    if parameter.expert:
        return setup.data_parallel * setup.tensor_parallel // setup.expert_parallel
    return setup.data_parallel


def _by_replicas(parameters: Iterable[Parameter], setup: TrainingSetup) -> dict[int, list[Parameter]]:
    found: dict[int, list[Parameter]] = defaultdict(list)
    for p in parameters:
        found[replicas(p, setup)].append(p)
    return found


def _divided_words(setup: TrainingSetup) -> list[str]:
    words = []
    if setup.tensor_parallel > 1:
        head = "; the head is whole, its loss goes in chunks" if setup.chunk_loss else ""
        words.append(f"layers are divided by {setup.tensor_parallel} as transformers' tensor parallel plan says{head}")
    if setup.sequence_parallel:
        words.append(f"between layers {setup.tensor_parallel} ranks have a part of the tokens each")
    if setup.expert_parallel > 1:
        words.append(f"experts are divided by {setup.expert_parallel} as transformers' expert parallel plan says")
    if setup.pipeline_parallel > 1:
        words.append(f"layers are on {setup.pipeline_parallel} stages, evenly as transformers divides them")
    return words


def parameter_bytes(parameter: Parameter) -> int:
    """As it is stored."""
    if parameter.quantized:
        return math.ceil(parameter.elements * _QUANTIZED_BYTES)
    return parameter.elements * parameter.itemsize


def _shard(parameter: Parameter, count: int, kind: str) -> Parameter:
    """The largest part: the first rank's."""
    first, *rest = parameter.shape or (1,)
    shape = (math.ceil(parameter.elements / count),) if kind == "zero3" else (math.ceil(first / count), *rest)
    return Parameter(parameter.name, shape, parameter.itemsize, parameter.trains, parameter.quantized)


class _Unit:
    """Bytes of one unit of FSDP2 when it is whole: parameters, their gradients, and those while they are reduced."""

    def __init__(self) -> None:
        self.held = self.gradients = self.reduced = 0

    def add(self, p: Parameter, itemsize: int, reduced_itemsize: int) -> None:
        self.held += parameter_bytes(p) if p.quantized else p.elements * itemsize
        self.gradients += p.elements * itemsize if p.trains else 0
        self.reduced += p.elements * reduced_itemsize if p.trains else 0

    @property
    def size(self) -> int:
        return self.held + self.gradients


def _gathered_by_fsdp(parameters: Iterable[Parameter], setup: TrainingSetup) -> tuple[int, int]:
    """(bytes that are whole at a time, number of units) of FSDP2."""
    units: dict[str, _Unit] = defaultdict(_Unit)
    own: dict[str, _Unit] = defaultdict(_Unit)
    for p in parameters:
        found = _UNIT.match(p.name)
        of = own if p.expert and replicas(p, setup) == 1 else units
        of[found[1] if found else ""].add(p, _GATHERED_BYTES if setup.compute_dtype else p.itemsize, p.itemsize)
    root = units.pop("", _Unit())
    largest = max(units.values(), key=lambda unit: unit.size, default=_Unit())
    # Nothing gathers what no other rank has, so nothing of it is on its way: a copy, and two of its gradients.
    copies = max((unit.held + 2 * unit.gradients for unit in own.values()), default=0)
    whole = 2 * largest.held if setup.reshard else sum(unit.held for unit in units.values())
    return root.size + whole + largest.gradients + largest.reduced + copies, len(units)


def _optimizer_bytes(trained: Sequence[Parameter], setup: TrainingSetup, *, is_divided: bool) -> tuple[int, int]:
    """(state, temporaries of ``step()``) of one rank, of what it holds; of a part of that where ``is_divided``."""
    if setup.optimizer == "none" or not trained:
        return 0, 0
    if is_divided:  # flat vectors, as DeepSpeed has them: experts in their own, they have fewer replicas
        trained = [
            Parameter("", (math.ceil(sum(p.elements for p in ps) / n),), ps[0].itemsize, True)
            for n, ps in _by_replicas(trained, setup).items()
        ]
    copies = 0
    if setup.master_weights:
        copies = sum(4 * p.elements for p in trained)
        trained = [Parameter(p.name, p.shape, 4, True) for p in trained]
    if setup.optimizer == "adamw_8bit":
        return copies + sum(map(_eight_bit_bytes, trained)), 0
    groups = [(*_OPTIMIZERS[setup.optimizer], list(trained))]
    if setup.optimizer == "muon":  # of hidden matrices; the rest is left to AdamW
        hidden = [p for p in trained if len(p.shape) == 2 and not _is_embedding(p)]
        rest = [p for p in trained if p not in hidden]
        groups = [(*_OPTIMIZERS["muon"], hidden), (*_OPTIMIZERS["adamw"], rest)]
    target, state, step = target_of(setup.device), copies, 0
    with torch.device("cpu"), HollowMode(target.kernels):
        for kind, settings, members in groups:
            kept, during = _step_bytes(kind, settings, members, target)
            state, step = state + kept, max(step, during)
    return state, step + (copies if setup.master_weights else 0)  # gradients in float32, for a moment


def _step_bytes(
    kind: type[torch.optim.Optimizer], settings: dict, members: Sequence[Parameter], target: TargetDevice
) -> tuple[int, int]:
    """(state, temporaries) of one optimizer.

    Of more than two equal blocks, two are run; what one more adds is multiplied. Kernels of whole lists add up
    over all parameters; elsewhere parameters take turns, and all of them run.
    """

    def of(left: Iterable[Parameter]) -> tuple[int, int]:
        dtypes = {2: torch.bfloat16, 4: torch.float32}
        own = [torch.nn.Parameter(hollow(p.shape, _strides(p.shape), dtypes[p.itemsize])) for p in left]
        return hollow_optimizer_bytes(kind, settings, own, kernels=target.kernels, block_bytes=target.block_bytes)

    blocks: dict[str, list[Parameter]] = defaultdict(list)
    for p in members:
        found = _UNIT.match(p.name) if target.has_list_kernels else None
        blocks[found[1] if found else ""].append(p)
    kept = blocks.pop("", [])
    alike: dict[tuple, list[list[Parameter]]] = defaultdict(list)
    for block in blocks.values():
        alike[tuple((p.shape, p.itemsize) for p in block)].append(block)
    for same in alike.values():
        kept += [p for block in same[:_RUN_BLOCKS] for p in block]
    base = of(kept)
    totals = list(base)
    for same in alike.values():
        if len(same) > _RUN_BLOCKS:
            one_more = of([*kept, *same[-1]])
            totals = [t + (len(same) - _RUN_BLOCKS) * (n - b) for t, n, b in zip(totals, one_more, base, strict=True)]
    return totals[0], totals[1]


def _is_embedding(parameter: Parameter) -> bool:
    return any(word in parameter.name for word in ("embed", "lm_head", "wte", "wpe"))


def _eight_bit_bytes(parameter: Parameter) -> int:
    if parameter.elements < _LEAST_QUANTIZED:
        return 8 * parameter.elements
    return 2 * (parameter.elements + 4 * math.ceil(parameter.elements / _SCALED_ELEMENTS))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def precision_words(setup: TrainingSetup) -> str:
    """How numbers are held, in words."""
    dtype, autocast = PRECISIONS[setup.precision]
    words = f"parameters, gradients and optimizer state in {dtype}"
    if setup.compute_dtype:
        words += f", the step in {setup.compute_dtype}"
    if setup.master_weights:
        words = f"parameters and gradients in {dtype}, the optimizer's copy and state in float32"
    return f"{words}, the step under autocast to {autocast}" if autocast else words
