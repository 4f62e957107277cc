"""Puts all hooks, once torch has been imported."""

import importlib.util
from types import ModuleType

from cuda_standin.script import (
    clock,
    compiling,
    deepspeed_ops,
    early_stopping,
    generation,
    out_of_memory,
    ranks,
    record,
    steps,
    stops,
    weights,
)
from cuda_standin.script.peaks import Peaks
from cuda_standin.script.request import request


def start(torch: ModuleType) -> None:
    """Called in every process of the script: launchers, ranks, loaders. What never uses the device reports nothing."""
    wanted = request()
    record.reached("import torch")
    clock.install(wanted)
    ranks.install(torch, wanted)
    compiling.install()
    weights.install(wanted)
    deepspeed_ops.install()
    generation.install()
    early_stopping.install()
    peaks = Peaks(torch)

    def device_is_used() -> None:  # CUDA's first use
        record.reached("the device")
        clock.event_times(torch)
        if wanted.history:
            steps.record_history(torch)
        out_of_memory.install(torch, peaks)
        stops.install(torch)

    torch.cuda._lazy_call(device_is_used)
    steps.install(torch, peaks, wanted)
    for file in wanted.plugins:
        spec = importlib.util.spec_from_file_location("_standin_plugin", file)
        assert spec is not None and spec.loader is not None
        plugin = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(plugin)
        plugin.start(torch)
