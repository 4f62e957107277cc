"""The blocks in which allocators give memory. No torch in here: plans for other shapes are made without it.

Known weakness: 512 bytes is the default of every accelerator in PyTorch that has a caching allocator. Settings of an
allocator that round up further are not read.
"""

BLOCK_BYTES = 512  # of an accelerator's allocator


def block_bytes(device_type: str) -> int:
    """1 on a CPU, whose allocator's peak counts the requested bytes."""
    return 1 if device_type == "cpu" else BLOCK_BYTES


def in_blocks(size: int, device_type: str) -> int:
    """``size`` as the device's allocator counts it: in whole blocks."""
    block = block_bytes(device_type)
    return -(-size // block) * block
