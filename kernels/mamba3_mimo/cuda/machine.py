"""Constants of the machine that the kernels are written for: an H100 or H200 (sm_90a)."""

SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that a block may use."""
ALIGNMENT = 16
"""Alignment in bytes that the bulk copy engine and the widest loads need."""
GROUP = 128
"""Threads of a warp group, which issues a matrix instruction together."""
LINE = 128
"""Bytes of a row of a swizzled tile for the matrix unit: 64 bf16 columns. Further columns are further tiles."""
SWIZZLE_128 = 1
"""The matrix unit's code for tiles whose rows are swizzled within 128 bytes."""
PROCESSORS = 132
"""Streaming multiprocessors."""
MOST_BLOCKS = 2**16 - 1
"""Most blocks of a grid along any axis but the first."""
