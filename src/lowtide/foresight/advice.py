"""``advise``: ways to train a model on given devices, ranked by predicted tokens a second among those that fit.

What is tried: how ranks divide the work, precision, where the optimizer is, how many sequences at a time (the rest of
the global batch is accumulated), logits whole or in chunks. Resident memory alone rules most of them out, before
anything is traced. The rest is looked at in the order of what each could reach if it recomputed nothing; each gets the
first good plan that its memory allows, until what is left cannot be faster than the last of those that are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lowtide.errors import LowtideError
from lowtide.estimation.device_table import Device
from lowtide.foresight.changes import Change, helpful_changes, toggles
from lowtide.foresight.forecast import Forecast
from lowtide.foresight.forecaster import Forecaster
from lowtide.foresight.training_setup import SetupError, TrainingSetup

_TOKENS = (1, 8192, 32768)  # of one micro-batch: about so many fill a device
RANKED = 8
_TENSOR = (1, 2, 4, 8)
_SHARDINGS = ("none", "zero1", "zero2", "fsdp")


# What several devices could do besides; ``lowtide plan`` answers for each of them.
NOT_TRIED = ("pipelines", "sequence parallel ranks", "expert parallel ranks", "ZeRO 3")


@dataclass(frozen=True)
class Advice:
    """What was tried.

    Attributes:
        ranked: Forecasts of setups that fit, most tokens a second first: at least the best ``RANKED``.
        tried: How many setups were looked at, those included that resident memory rules out, or that cannot be faster.
        toggles: Of the best one: what each single change would do. Where none fits, changes of ``nearest`` that help.
    """

    ranked: list[Forecast]
    tried: int
    toggles: list[Change]
    nearest: Forecast | None


def advise(
    forecaster: Forecaster,
    device: Device,
    *,
    seq_len: int,
    gpus: int = 1,
    global_batch: int = 1,
    optimizer: str = "adamw",
    precision: str | None = None,
    lora_rank: int = 0,
    quantized: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Advice:
    """Return the setups that fit, best first.

    Args:
        gpus: Devices of one machine.
        global_batch: Sequences of one optimizer's step, over all ranks.
        precision: None: mixed and, where the device has it, bfloat16 throughout.

    Raises:
        SetupError: nothing can be tried: the global batch is smaller than the number of ranks needs.
    """
    base = TrainingSetup(device, seq_len=seq_len, optimizer=optimizer, lora_rank=lora_rank, quantized=quantized)
    forecaster.subject.check(base)
    precisions = [precision] if precision else _precisions(device)
    around = list(_around(forecaster, base, gpus, global_batch, precisions))
    if not around:
        raise SetupError(
            f"--global-batch {global_batch} cannot be divided among --gpus {gpus}. Pass a multiple of {gpus}."
        )
    candidates: list[tuple[float, TrainingSetup]] = []
    for done, setup in enumerate(around, start=1):
        candidates += [(_best_rate(forecaster, c), c) for c in _micro_batches(forecaster, setup, global_batch)]
        if progress is not None:
            progress(done, len(around))
    candidates.sort(key=lambda c: -c[0])  # stable: all on the device before what is on the host
    found: list[Forecast] = []
    nearest = None
    for best_rate, candidate in candidates:
        if len(found) >= RANKED and best_rate <= (found[RANKED - 1].tokens_per_second or 0.0):
            break
        forecast = _forecast(forecaster, candidate)
        if forecast is None:
            continue
        if forecast.fits:
            found = sorted([*found, forecast], key=lambda f: (-(f.tokens_per_second or 0.0), f.peak_bytes.expected))
        elif nearest is None or forecast.peak_bytes.expected < nearest.peak_bytes.expected:
            nearest = forecast
    ranked, tried = found, len(candidates)
    changes = _toggles(forecaster, ranked[0]) if ranked else []
    if not ranked and nearest is not None:
        changes = helpful_changes(forecaster, nearest.setup)
    return Advice(ranked, tried, changes, nearest)


def _precisions(device: Device) -> list[str]:
    return ["bf16-mixed", "bf16"] if "bfloat16" in device.matrix_flops else ["fp16-mixed"]


def _around(
    forecaster: Forecaster, base: TrainingSetup, gpus: int, global_batch: int, precisions: list[str]
) -> Iterator[TrainingSetup]:
    """What surrounds the step; those whose resident memory fits first, all on the device before what is on the host."""
    for offload in (False, True):
        for precision in precisions:
            for tensor in _TENSOR:
                data = gpus // tensor
                if gpus % tensor or data < 1 or global_batch % data or (offload and base.optimizer == "none"):
                    continue
                for sharding in _shardings(data, tensor):
                    try:
                        setup = replace(
                            base, precision=precision, tensor_parallel=tensor, data_parallel=data, sharding=sharding,
                            offload_optimizer=offload,
                        )  # fmt: skip
                        forecaster.subject.check(setup)
                    except SetupError:  # heads that do not split, adapters on divided layers
                        continue
                    yield setup


def _shardings(data: int, tensor: int) -> tuple[str, ...]:
    """Divided layers are combined with replicas and with everything divided; what lies between is tried without."""
    if data == 1:
        return ("none",)
    return _SHARDINGS if tensor == 1 else ("none", "fsdp")


def _micro_batches(forecaster: Forecaster, setup: TrainingSetup, global_batch: int) -> Iterator[TrainingSetup]:
    """From the largest micro-batch down, with the loss as it is and in chunks."""
    each = global_batch // setup.data_parallel
    sizes = {max(1, min(each, tokens // forecaster.subject.row_tokens(setup))) for tokens in _TOKENS}
    if forecaster.refuses(setup):
        yield replace(setup, accumulate=each)
        return
    for size in sorted(sizes, reverse=True):
        while each % size:
            size -= 1
        candidate = replace(setup, batch_size=size, accumulate=each // size)
        yield candidate
        yield replace(candidate, chunk_loss=True)


def _best_rate(forecaster: Forecaster, setup: TrainingSetup) -> float:
    try:
        return forecaster.best_rate(setup)
    except LowtideError:  # the model has no such choice
        return 0.0


def _forecast(forecaster: Forecaster, setup: TrainingSetup) -> Forecast | None:
    try:
        return forecaster.forecast(setup, thorough=False)
    except LowtideError:  # the model has no such choice
        return None


def _toggles(forecaster: Forecaster, best: Forecast) -> list[Change]:
    """Each change of the best setup that keeps its number of devices."""
    found = []
    for option, meaning, setup in (*_back(best.setup), *toggles(best.setup)):
        if setup.ranks != best.setup.ranks or setup.offload_activations != best.setup.offload_activations:
            continue
        forecast = _forecast(forecaster, setup)
        if forecast is not None:
            found.append(Change(option, meaning, forecast))
    return found


def _back(setup: TrainingSetup) -> Iterator[tuple[str, str, TrainingSetup]]:
    """What the best setup would be without what it has chosen."""
    if setup.chunk_loss:
        yield "without --chunk-loss", "logits whole", replace(setup, chunk_loss=False)
    if setup.offload_optimizer:
        yield "without --offload-optimizer", "the optimizer on the device", replace(setup, offload_optimizer=False)
    if setup.attention == "auto":
        yield "--attention eager", "scores stored", replace(setup, attention="eager")
