"""What to change where a setup does not fit, and what each toggle costs: one change at a time, with its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lowtide.errors import LowtideError
from lowtide.foresight.device_peak import DOES_NOT_FIT, UNCERTAIN
from lowtide.foresight.forecast import Forecast
from lowtide.foresight.forecaster import Forecaster
from lowtide.foresight.parallel_model import is_divided
from lowtide.foresight.training_setup import SetupError, TrainingSetup

_RANKS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Change:
    """One change of a setup, and what comes of it.

    Attributes:
        option: As it is typed; ``meaning`` says it in words.
    """

    option: str
    meaning: str
    forecast: Forecast


def toggles(setup: TrainingSetup) -> Iterator[tuple[str, str, TrainingSetup]]:
    """(option, meaning, setup) of each change that may help; those that keep the numbers of training come first."""
    if setup.batch_size > 1:
        more = setup.batch_size * setup.accumulate
        yield (
            f"--batch-size 1 --accumulate {more}",
            "one sequence at a time",
            replace(setup, batch_size=1, accumulate=more),
        )
    if setup.attention == "eager":
        yield "--attention sdpa", "fused attention", replace(setup, attention="sdpa")
    if not setup.chunk_loss and not setup.sequence_parallel and setup.pipeline_parallel == 1:
        yield "--chunk-loss", "logits and loss in chunks", replace(setup, chunk_loss=True)
    if not setup.offload_activations:
        yield "--offload-activations", "activations may go to host memory", replace(setup, offload_activations=True)
    if not setup.offload_optimizer and setup.optimizer != "none":
        yield "--offload-optimizer", "the optimizer on the host", replace(setup, offload_optimizer=True)
    alone = setup.ranks == 1 and setup.accumulate == 1 and not setup.master_weights and not setup.offload_optimizer
    if alone and setup.optimizer != "none" and not setup.optimizer_in_backward:
        what = "each gradient is used and freed at once; no clipping by the global norm"
        yield "--optimizer-in-backward", what, replace(setup, optimizer_in_backward=True)
    if setup.tensor_parallel > 1 and not setup.sequence_parallel and not setup.chunk_loss:
        yield "--sequence-parallel", "between layers a part of the tokens", replace(setup, sequence_parallel=True)
    for ranks in _RANKS:
        experts_divide = not (ranks * setup.tensor_parallel) % setup.expert_parallel
        if ranks > setup.data_parallel and experts_divide and setup.pipeline_parallel == 1:
            yield (
                f"--gpus {ranks * setup.tensor_parallel} --sharding fsdp",
                f"everything divided by {ranks}",
                replace(setup, data_parallel=ranks, sharding="fsdp"),
            )
    if setup.sharding not in ("fsdp", "zero3") and setup.data_parallel > 1 and setup.pipeline_parallel == 1:
        yield "--sharding fsdp", f"everything divided by {setup.data_parallel}", replace(setup, sharding="fsdp")
    if setup.precision == "fp32" or setup.precision.endswith("mixed"):
        lower = "fp16" if setup.precision == "fp16-mixed" else "bf16"
        yield (
            f"--precision {lower}",
            "parameters and optimizer in 16 bits; other numbers",
            replace(setup, precision=lower),
        )
    if setup.master_weights:
        yield "without --master-weights", "no copy in float32; other numbers", replace(setup, master_weights=False)
    if setup.optimizer in ("adamw", "adam", "adamw_fused"):
        if setup.optimizer != "adamw_fused":
            yield "--optimizer adamw_fused", "its step in one kernel", replace(setup, optimizer="adamw_fused")
        yield "--optimizer adamw_8bit", "its state in 8 bits; other numbers", replace(setup, optimizer="adamw_8bit")
    if setup.optimizer not in ("adafactor", "none"):
        yield (
            "--optimizer adafactor",
            "its state by rows and columns; other numbers",
            replace(setup, optimizer="adafactor"),
        )
    if not setup.lora_rank and not is_divided(setup):
        yield "--lora 16", "train adapters alone", replace(setup, lora_rank=16, master_weights=False)
        yield (
            "--lora 16 --quantized",
            "train adapters on 4-bit layers",
            replace(setup, lora_rank=16, quantized=True, master_weights=False),
        )


def helpful_changes(forecaster: Forecaster, setup: TrainingSetup, *, most: int = 6, trace: bool = True) -> list[Change]:
    """The first changes under which the setup fits; where none does, those that bring it nearest.

    Args:
        trace: False: at once, by what is resident alone; then "uncertain" means that this leaves room.
    """
    found: list[Change] = []
    sharded = False
    for option, meaning, changed in toggles(setup):
        if sum(change.forecast.fits for change in found) >= most:
            break
        adds_ranks = changed.ranks > setup.ranks
        if adds_ranks and sharded:  # a smaller number of devices does it already
            continue
        try:
            forecast = forecaster.forecast(changed, thorough=False) if trace else forecaster.residents(changed)
        except (SetupError, LowtideError):  # the model has no such choice
            continue
        if adds_ranks and forecast.verdict == DOES_NOT_FIT:
            continue
        sharded |= adds_ranks
        found.append(Change(option, meaning, forecast))
    helping = [
        change for change in found if change.forecast.fits or (not trace and change.forecast.verdict == UNCERTAIN)
    ]
    if helping:
        return helping[:most]
    return sorted(found, key=lambda change: change.forecast.peak_bytes.expected)[:most]
