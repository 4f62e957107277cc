"""The device that a step without memory is planned for."""

from dataclasses import dataclass, replace

from lowtide.estimation.device_table import Device, device_named

_CUDA_BLOCK_BYTES = 512
_SHARED_KIB = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (12, 0): 99, (12, 1): 99}
_ANY_CUDA = "h100"  # whose facts a device has that is called "cuda" alone


@dataclass(frozen=True)
class TargetDevice:
    """What of a device decides which kernels run and what they allocate; no speeds and no sizes of memory.

    Attributes:
        kernels: ``cpu`` or ``cuda``.
        name: As graphs and reports show it.
        capability: Of a CUDA device; which attention kernel it has.
        multiprocessors: Among which a CUDA device divides the work of a kernel; 0: not known.
        blas_workspace_bytes: What cuBLAS keeps for each thread that multiplies.
    """

    kernels: str = "cpu"
    name: str = ""
    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 0
    blas_workspace_bytes: int = 0

    def __post_init__(self) -> None:
        if self.kernels not in ("cpu", "cuda"):
            raise ValueError(f"kernels={self.kernels!r} is not known. Use 'cpu' or 'cuda'.")

    @property
    def has_list_kernels(self) -> bool:
        """An optimizer takes all parameters at once (``foreach``) unless it is set otherwise."""
        return self.kernels == "cuda"

    @property
    def block_bytes(self) -> int:
        """The allocator gives whole blocks."""
        return _CUDA_BLOCK_BYTES if self.kernels == "cuda" else 1

    def in_blocks(self, size: int) -> int:
        """``size`` as the allocator counts it."""
        return -(-size // self.block_bytes) * self.block_bytes

    @property
    def threads_per_multiprocessor(self) -> int:
        """That a CUDA device keeps at once. CUDA C++ Programming Guide, "Technical Specifications per Compute
        Capability"."""
        if self.capability == (7, 5):
            return 1024
        return 1536 if self.capability in ((8, 6), (8, 9), (12, 0), (12, 1)) else 2048

    @property
    def shared_memory_bytes(self) -> int:
        """The most that a block of threads may have on a CUDA device; the same guide."""
        return _SHARED_KIB.get(self.capability, 227 if self.capability >= (9, 0) else 48) << 10


def target_of(device: "str | Device | TargetDevice") -> TargetDevice:
    """``device`` as a description: ``"cpu"`` and ``"cuda"`` are kernels alone, other names are of the device table.

    Of devices that are neither, the kernels are not known: they count as the CPU's.

    Raises:
        UnknownDeviceError: no such device; the message has the nearest names.
    """
    if isinstance(device, TargetDevice):
        return device
    if device == "cpu":
        return TargetDevice("cpu")
    if device == "cuda":
        return replace(target_of(_ANY_CUDA), name="")
    found = device if isinstance(device, Device) else device_named(device)
    if found.kind != "cuda":
        return TargetDevice("cpu", found.title)
    version = found.compute_capability or 9.0
    capability = int(version), round(10 * version) % 10
    return TargetDevice("cuda", found.title, capability, found.multiprocessors, found.blas_workspace_bytes)
