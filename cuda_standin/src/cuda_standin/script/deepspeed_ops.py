"""DeepSpeed's optimizers that are compiled when they are first used: here they do nothing, and take no nvcc.

``FusedAdam`` runs on the device, where nothing is computed; ``DeepSpeedCPUAdam`` would fill the host's memory with
states of weights that have no values. Both make their states in Python, which is left as it is.
"""

import os
from types import SimpleNamespace
from typing import Any

from cuda_standin import imports
from cuda_standin.script import record

_FUNCTIONS = {
    "fused_adam": ("multi_tensor_adam",),
    "fused_lion": ("multi_tensor_lion",),
    "cpu_adam": ("create_adam", "adam_update", "adam_rollback", "destroy_adam"),
    "cpu_adagrad": ("create_adagrad", "adagrad_update", "destroy_adagrad"),
    "cpu_lion": ("create_lion", "lion_update", "destroy_lion"),
}


def install() -> None:
    if "STANDIN_SKIP_BYTES" in os.environ:  # else every operator has right values, and these must have them
        imports.after_import("deepspeed.ops.op_builder.builder", _without_compiler)


def _without_compiler(module: Any) -> None:
    load = module.OpBuilder.jit_load

    def jit_load(builder: Any, *args: Any, **kwargs: Any) -> Any:
        functions = _FUNCTIONS.get(builder.name)
        if functions is None:
            return load(builder, *args, **kwargs)
        record.notes.add(f"DeepSpeed's {builder.name} is not compiled: its states are there, and it computes nothing")
        return SimpleNamespace(**dict.fromkeys(functions, lambda *_: None))

    module.OpBuilder.jit_load = jit_load
