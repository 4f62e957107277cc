"""The device that a step without memory is planned for."""

from dataclasses import dataclass

from lowtide.estimation.device_table import Device, device_named

_CUDA_BLOCK_BYTES = 512


@dataclass(frozen=True)
class TargetDevice:
    """What of a device decides which kernels run and what they allocate; no speeds and no sizes of memory.

    Attributes:
        kernels: ``cpu`` or ``cuda``.
        name: As graphs and reports show it.
        capability: Of a CUDA device; which attention kernel it has.
    """

    kernels: str = "cpu"
    name: str = ""
    capability: tuple[int, int] = (9, 0)

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


def target_of(device: "str | Device | TargetDevice") -> TargetDevice:
    """``device`` as a description: ``"cpu"`` and ``"cuda"`` are kernels alone, other names are of the device table.

    Of devices that are neither, the kernels are not known: they count as the CPU's.

    Raises:
        UnknownDeviceError: no such device; the message has the nearest names.
    """
    if isinstance(device, TargetDevice):
        return device
    if device in ("cpu", "cuda"):
        return TargetDevice(str(device))
    found = device if isinstance(device, Device) else device_named(device)
    if found.kind != "cuda":
        return TargetDevice("cpu", found.title)
    version = found.compute_capability or 9.0
    return TargetDevice("cuda", found.title, (int(version), round(10 * version) % 10))
