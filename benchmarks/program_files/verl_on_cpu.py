"""verl's SFT trainer on a machine without an accelerator: a platform of verl's plugin interface, the CPU with gloo.

    torchrun --nproc-per-node 1 verl_on_cpu.py data.train_files=... model.path=...

Nothing that computes is replaced: its worker, its FSDP engine, its losses and its loop are as they are.
"""

import os
from contextlib import nullcontext
from typing import Any

import torch
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_cuda import PlatformCUDA


@platform_manager.PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    device_name, vendor_name, device_module = "cpu", "cpu", torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def _nothing(self, *_: Any) -> None:
        pass

    set_device = synchronize = manual_seed = manual_seed_all = _nothing
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing


os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}  # the engine that is registered for cuda
for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
    setattr(torch.cpu, name, lambda *_: 0)  # for its metrics
torch.cpu.empty_cache = torch.cpu.set_device = lambda *_: None

from verl.utils import distributed  # noqa: E402 - after the platform is there


def _use_gloo(timeout_second: int = 36000) -> tuple[int, int, int]:  # verl names the CPU's backend twice
    torch.distributed.init_process_group("gloo")
    return int(os.environ["LOCAL_RANK"]), torch.distributed.get_rank(), torch.distributed.get_world_size()


distributed.initialize_global_process_group = _use_gloo

if __name__ == "__main__":
    from verl.trainer import sft_trainer

    sft_trainer.main()
