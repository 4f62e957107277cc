"""DeepSpeed's parts that need more than this machine: compiled optimizers, and what another stage would tell.

Optimizers that are compiled when they are first used do nothing here, and take no nvcc.

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
    imports.after_import("deepspeed.runtime.pipe.engine", _with_shapes_as_objects)
    if "STANDIN_SKIP_BYTES" in os.environ:  # else every operator has right values, and these must have them
        imports.after_import("deepspeed.ops.op_builder.builder", _without_compiler)


def _with_shapes_as_objects(module: Any) -> None:
    """A stage tells the next one its outputs' shapes in a tensor, whose numbers nobody sends here; objects are kept."""
    import torch.distributed as dist

    def send(engine: Any, buffer: Any, stage: int) -> None:
        several = isinstance(buffer, (tuple, list))
        shapes = [(tuple(t.shape), t.dtype) for t in (buffer if several else (buffer,))]
        dist.send_object_list([several, shapes], engine.grid.stage_to_global(stage_id=stage))

    def receive(engine: Any, stage: int) -> Any:
        found: list[Any] = [None, None]
        dist.recv_object_list(found, engine.grid.stage_to_global(stage_id=stage))
        several, shapes = found
        made = [engine._allocate_or_extend_buffers(i, list(shape), dtype) for i, (shape, dtype) in enumerate(shapes)]
        return tuple(made) if several else made[0]

    module.PipelineEngine._send_tensor_meta, module.PipelineEngine._recv_tensor_meta = send, receive


def _without_compiler(module: Any) -> None:
    load = module.OpBuilder.jit_load

    def jit_load(builder: Any, *args: Any, **kwargs: Any) -> Any:
        functions = _FUNCTIONS.get(builder.name)
        if functions is None:
            return load(builder, *args, **kwargs)
        record.notes.add(f"DeepSpeed's {builder.name} is not compiled: its states are there, and it computes nothing")
        return SimpleNamespace(**dict.fromkeys(functions, lambda *_: None))

    module.OpBuilder.jit_load = jit_load
