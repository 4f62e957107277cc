"""Random sequences of allocations, and what an allocator model makes of one."""

from hypothesis import strategies as st

KIB, MIB = 1 << 10, 1 << 20
# Around the sizes where CUDA's rules change, and anything between.
_SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, MIB + 512),
    st.integers(MIB - 512, 12 * MIB),
    st.integers(9 * MIB, 30 * MIB),
    st.sampled_from([MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 19 * MIB, 20 * MIB]),
)


@st.composite
def traces(draw):
    """Changes as ``block_log`` writes them: (block, bytes), 0 bytes where the block is given back."""
    changes, alive = [], []
    for number in range(draw(st.integers(1, 40))):
        if alive and draw(st.booleans()):
            changes.append((alive.pop(draw(st.integers(0, len(alive) - 1))), 0))
        changes.append((number, draw(_SIZES)))
        alive.append(number)
    return changes


def play(allocator, changes):
    """Allocated and reserved bytes of the model after each change."""
    blocks, states = {}, []
    for number, size in changes:
        if size:
            blocks[number] = allocator.allocate(size)
        else:
            allocator.free(blocks.pop(number))
        states.append((allocator.allocated_bytes, allocator.reserved_bytes))
    return states
