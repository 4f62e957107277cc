"""Jobs of many ranks, of which one exists: launchers start it alone, and the others are stood in for."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from cuda_standin import imports
from cuda_standin.script import record
from cuda_standin.script.request import Request

_is_stood_in = False


def install(torch: ModuleType, wanted: Request) -> None:
    if not torch.distributed.is_available():
        return
    imports.after_import("torch.distributed.launcher.api", lambda module: _one_agent(module, wanted))
    imports.after_import("torch.multiprocessing.spawn", lambda module: _one_process(torch, module, wanted))
    if "deepspeed.launcher.launch" in sys.orig_argv:  # run as a module: it is never imported
        _one_of_deepspeed(wanted)
    ranks = wanted.ranks or int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        _stand_in(wanted, ranks)


def environment(wanted: Request, ranks: int, per_node: int) -> dict[str, str]:
    """What a launcher tells the process of rank ``wanted.rank``."""
    return {
        "WORLD_SIZE": str(ranks), "RANK": str(wanted.rank), "LOCAL_RANK": str(wanted.rank % per_node),
        "LOCAL_WORLD_SIZE": str(min(ranks, per_node)), "GROUP_RANK": str(wanted.rank // per_node),
        "ROLE_RANK": str(wanted.rank), "ROLE_WORLD_SIZE": str(ranks), "GROUP_WORLD_SIZE": str(-(-ranks // per_node)),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "one-rank",
        "STANDIN_DEVICES": str(min(ranks, per_node)),
        "STANDIN_CONTEXT": str(wanted.context_mib + (wanted.nccl_mib if ranks > 1 else 0)),
    }  # fmt: skip


def _stand_in(wanted: Request, ranks: int) -> None:
    """The group is asked for when torch.distributed is complete, which is when the script begins."""
    from cuda_standin import process_group

    global _is_stood_in
    if _is_stood_in:
        return
    if wanted.rank >= ranks:
        raise SystemExit(f"cuda_standin: rank {wanted.rank} of {ranks}: ranks go from 0 to {ranks - 1}.")
    keep = {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in os.environ}
    process_group.install(ranks, wanted.rank, _objects(wanted))
    imports.after_import("torch.distributed.pipelining.stage", _gradients_like_outputs)
    os.environ.update(keep)
    _is_stood_in = True
    record.facts["ranks"], record.facts["rank"] = ranks, wanted.rank


def _objects(wanted: Request) -> Any:
    """What other ranks have sent in runs of theirs; a rank that has to run before this one is reported."""
    from cuda_standin import lone_objects

    def sent(to: int, count: int) -> None:
        if (to, count) == (wanted.sends_to, wanted.sends):
            record.facts["stopped"] = True
            record.write()
            raise SystemExit(0)

    def missing(source: int, count: int) -> None:
        record.facts["needs"] = {"rank": source, "count": count}
        record.write()

    return lone_objects.LoneObjects(wanted.rank, Path(wanted.objects) if wanted.objects else None, sent, missing)


def _gradients_like_outputs(module: ModuleType) -> None:
    """A stage asks the next one what its gradients look like (PyTorch 2.14): as what it was given does."""
    ask = getattr(module.PipelineStage, "_recv_meta", None)
    if ask is None:
        return

    def received(stage: Any, source: int) -> Any:
        if source < stage.stage_index:
            return ask(stage, source)
        outputs = stage._stage_meta.outputs
        return module._StageBackwardMeta(backward_metas=module._derive_grad_metas(outputs))

    module.PipelineStage._recv_meta = received


def _one_agent(module: Any, wanted: Request) -> None:
    """torchrun, accelerate launch, and whatever else uses PyTorch's elastic launcher."""

    def launch_agent(config: Any, entrypoint: Any, args: Any, *_: Any, **__: Any) -> dict[int, Any]:
        per_node = config.nproc_per_node
        ranks = wanted.ranks or per_node * config.max_nodes
        told = environment(wanted, ranks, min(per_node, ranks))
        if isinstance(entrypoint, str):
            code = subprocess.run([entrypoint, *args], env={**os.environ, **told}).returncode
            if code:
                sys.exit(code)
            return {wanted.rank: None}
        os.environ.update(told)
        _stand_in(wanted, ranks)
        return {wanted.rank: entrypoint(*args)}

    module.launch_agent = launch_agent


def _one_process(torch: ModuleType, module: Any, wanted: Request) -> None:
    spawn, start = module.spawn, module.start_processes

    def alone(fn: Any, args: tuple = (), nprocs: int = 1, *more: Any, **options: Any) -> Any:
        ranks = wanted.ranks or nprocs
        if nprocs <= 1:
            return start(fn, args, nprocs, *more, **options)
        local = wanted.rank % nprocs
        os.environ.update(LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(nprocs))
        _stand_in(wanted, ranks)
        record.notes.add(
            f"torch.multiprocessing would start {nprocs} processes: process {local} alone runs, in this one"
        )
        return fn(local, *args)

    module.start_processes = alone
    module.spawn = functools.wraps(spawn)(
        lambda fn, args=(), nprocs=1, join=True, daemon=False, start_method="spawn": alone(
            fn, args, nprocs, join, daemon, start_method
        )
    )
    torch.multiprocessing.spawn, torch.multiprocessing.start_processes = module.spawn, module.start_processes


class _Ended:
    """A process of a rank that does not exist."""

    pid = returncode = 0

    def poll(self, *_: Any, **__: Any) -> int:
        return 0

    wait = terminate = kill = send_signal = poll


def _one_of_deepspeed(wanted: Request) -> None:
    """DeepSpeed's launcher starts a process for each rank of a node: those that do not exist end at once."""
    real: Any = subprocess.Popen

    def popen(command: Any, *args: Any, env: dict[str, str] | None = None, **options: Any) -> Any:
        if env is None or "RANK" not in env:
            return real(command, *args, env=env, **options)
        if env["RANK"] != str(wanted.rank):
            return _Ended()
        ranks = int(env["WORLD_SIZE"])
        told = environment(wanted, wanted.ranks or ranks, min(ranks, wanted.ranks_per_node))
        return real(command, *args, env={**env, **told}, **options)

    subprocess.Popen = popen  # type: ignore[misc, assignment]
