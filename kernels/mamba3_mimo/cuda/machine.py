"""The constants of the machine that the kernels are written for, an H100 or H200 (sm_90a)."""

SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that a block can have."""
ALIGNMENT = 16
"""Bytes: what an address of the bulk copy engine and of the widest load is a multiple of."""
GROUP = 128
"""Threads of a warp group: what issues a matrix instruction together."""
LINE = 128
"""Bytes of a row of a tile that the matrix unit reads swizzled: 64 columns bf16; further ones lie whole tiles on."""
SWIZZLE_128 = 1
"""The matrix unit's name of tiles whose rows are swizzled within 128 bytes."""
PROCESSORS = 132
"""Streaming multiprocessors."""
MOST_BLOCKS = 2**16 - 1
"""Blocks that a grid can have along any axis but its first."""
