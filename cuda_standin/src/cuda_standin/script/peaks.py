"""The allocator's peaks of each step. They are reset for that, and the script does not see it."""

from types import ModuleType

_Key = tuple[int, str, str]  # device, statistic, pool


class Peaks:
    """Reads and resets PyTorch's peaks; what the script reads goes on from its own last reset.

    ``torch._C._cuda_memoryStats`` and ``_cuda_resetPeakMemoryStats`` are what every reader and every reset of PyTorch
    goes through.
    """

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._read = torch._C._cuda_memoryStats
        self._reset = torch._C._cuda_resetPeakMemoryStats
        self._seen_by_script: dict[_Key, int] = {}
        self._step = {"allocated_bytes": 0, "reserved_bytes": 0}
        torch._C._cuda_memoryStats = self._for_the_script
        torch._C._cuda_resetPeakMemoryStats = self._reset_by_script

    def current(self, device: int) -> dict:
        return self._read(device)

    def of_step(self) -> dict[str, int]:
        """The peaks since the last call of ``next_step``, of the device that had most."""
        self._take()
        return dict(self._step)

    def next_step(self) -> None:
        self._take()
        self._step = dict.fromkeys(self._step, 0)
        for device in self._devices():
            self._reset(device)

    def _devices(self) -> range:
        return range(self._torch.cuda.device_count() if self._torch.cuda.is_initialized() else 0)

    def _take(self) -> None:
        for device in self._devices():
            stats = self._read(device)
            for name in self._step:
                self._step[name] = max(self._step[name], stats[name]["all"]["peak"])
            for key, peak in _peaks(device, stats):
                self._seen_by_script[key] = max(peak, self._seen_by_script.get(key, 0))

    def _for_the_script(self, device: int) -> dict:
        stats = self._read(device)
        for key, peak in _peaks(device, stats):
            _, name, pool = key
            stats[name][pool]["peak"] = max(peak, self._seen_by_script.get(key, 0))
        return stats

    def _reset_by_script(self, device: int) -> None:
        self._take()
        self._seen_by_script = {key: peak for key, peak in self._seen_by_script.items() if key[0] != device}
        self._reset(device)


def _peaks(device: int, stats: dict) -> list[tuple[_Key, int]]:
    return [
        ((device, name, pool), value["peak"])
        for name, pools in stats.items()
        if isinstance(pools, dict)
        for pool, value in pools.items()
        if isinstance(value, dict) and "peak" in value
    ]
