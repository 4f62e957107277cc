"""The device that a step without memory is planned for."""

from dataclasses import dataclass


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
    def block_bytes(self) -> int:
        """The allocator gives whole blocks."""
        return 512 if self.kernels == "cuda" else 1


def target_of(device: "str | TargetDevice") -> TargetDevice:
    """``device`` as a description; of a name the kernels alone are known.

    Raises:
        ValueError: no kernels of that name.
    """
    if isinstance(device, TargetDevice):
        return device
    if device not in ("cpu", "cuda"):
        raise ValueError(
            f"device={device!r} is not known. Use 'cpu', 'cuda', or TargetDevice(kernels='cuda', name={device!r})."
        )
    return TargetDevice(device)
