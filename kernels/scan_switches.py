"""Switches of the Mamba-3 scan, and the names of the facts that it records. Torch-free.

Service and experiments must not import torch, so they read the scan's declarations from here. The kernels do, too.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias, get_args

from ablate.kernels.backends import Lane

Schedule: TypeAlias = Literal["sequential", "chunk_parallel"]

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
CHUNK_SIZES = (8, 16, 32, 64, 128, 256)
"""Tokens per chunk that a configuration may ask for. A lane may refuse some."""
MAX_SUPERCHUNK = 4096
"""Most tokens per super-chunk that a configuration may ask for, in multiples of its chunk size."""
PIPELINE_STAGES = (0, 1, 2)
HEADS_IN_TURN = (0, 1, 2, 4)
COMPILER = "ablate.kernels.mamba3_mimo.cuda.host.compiled"
"""Module of lane cuda that counts the kernels of this process, once something has imported it."""


@dataclass(frozen=True, kw_only=True)
class ScanSwitches:
    """How to execute the scan. Switches change speed and memory, never the mathematics.

    Only lane cuda reads the switches from `superchunk` on, and lane peer `warp_specialize`. The operation's `supports`
    gives the reason why a combination cannot run.
    """

    lane: Lane = Lane.REFERENCE
    """Implementation family."""
    schedule: Schedule = "chunk_parallel"
    """`sequential` walks time in order: step by step (reference) or chunk by chunk (cuda, xla). `chunk_parallel`
    computes all chunks (reference, xla) or super-chunks (cuda) at once."""
    chunk_size: int = 16
    """C, tokens per chunk. The reference lane's sequential schedule ignores it."""
    psiv_cache: bool = False
    """Save PsiV = v * psi in the forward pass, instead of recomputing it in the backward pass."""
    remat: bool = False
    """Recompute values in the backward pass instead of saving them. Lane xla: the values that torch's minimum cut
    chooses. Lane cuda: the states that enter the chunks, from the states of the super-chunks."""
    superchunk: int = 0
    """Tokens per super-chunk, which one block of the chunk_parallel schedule walks. The sequential schedule has no
    super-chunks. 0: chosen for the sizes of the scan. The choice may be a whole row, by the sequential kernels."""
    heads_in_turn: int = 0
    """Heads of a group that one block of the backward walk takes in turn while it adds up their gradients of q and k.
    0: chosen for the sizes of the scan."""
    pipeline_stages: int = 1
    """Chunks to load ahead of the arithmetic. 0 loads synchronously."""
    fast_math: bool = True
    """Let the compiler use the hardware's approximate exp2 and tanh."""
    tma: bool = True
    """Load tiles with the tensor memory accelerator (bulk tensor copies). Off: cp.async."""
    warp_specialize: bool = False
    """Let one warp group of the backward walk only copy, while the others compute. Lane peer: of the official forward
    kernel, which then also has TMA."""
    aggressive_smem_merge: bool = False
    """Let the compiler overlap shared buffers whose lifetimes do not meet."""
    layout_2d: bool = True
    """Keep tiles of q and k in shared memory as swizzled [rank * time, state]; off: plain [rank, time, state]."""


class ScanFact(StrEnum):
    """Names of the facts that a scan records while it runs, as receipts store them.

    A fact with the name of a switch holds its live value, or "mixed" if kernels or passes differ. Lane cuda reads the
    facts from `PIPELINE_STAGES` to `PSIV_CACHE` from its machine code.
    """

    LANE = "mamba3_mimo.lane"
    SCHEDULE = "mamba3_mimo.schedule"
    DTYPE = "mamba3_mimo.dtype"
    """Dtype of q, k, v and z as the scan receives them."""
    CHUNK_SIZE = "mamba3_mimo.chunk_size"
    SUPERCHUNK = "mamba3_mimo.superchunk"
    SUPERCHUNK_OF_SIZES = "mamba3_mimo.superchunk_of_sizes"
    """Tokens per super-chunk that `superchunk` = 0 would choose for these sizes (lane cuda); 0 for a whole row that
    one block walks."""
    HEADS_IN_TURN = "mamba3_mimo.heads_in_turn"
    HEADS_IN_TURN_OF_SIZES = "mamba3_mimo.heads_in_turn_of_sizes"
    """Heads in turn that `heads_in_turn` = 0 would choose for these sizes (lane cuda)."""
    PIPELINE_STAGES = "mamba3_mimo.pipeline_stages"
    FAST_MATH = "mamba3_mimo.fast_math"
    TMA = "mamba3_mimo.tma"
    WARP_SPECIALIZE = "mamba3_mimo.warp_specialize"
    AGGRESSIVE_SMEM_MERGE = "mamba3_mimo.aggressive_smem_merge"
    LAYOUT_2D = "mamba3_mimo.layout_2d"
    PSIV_CACHE = "mamba3_mimo.psiv_cache"
    PSIV_SAVED_BYTES = "mamba3_mimo.psiv_saved_bytes"
    """Bytes of PsiV saved between the passes; absent if it is recomputed."""
    PSIV_TRAFFIC_BYTES = "mamba3_mimo.psiv_traffic_bytes"
    """Bytes of the saved PsiV that kernels write and read (lane cuda)."""
    PSIV_RECOMPUTES = "mamba3_mimo.psiv_recomputes"
    """Backward passes that recomputed PsiV."""
    REMAT = "mamba3_mimo.remat"
    """Whether backward passes repeated operations of the forward pass other than PsiV (lane xla), or launched the
    forward kernel again to make the states of the chunks (lane cuda)."""
    HANDED_BYTES = "mamba3_mimo.handed_bytes"
    """Bytes that forward passes hand to backward passes, gradients included (lane xla, chunk_parallel). As many bytes
    must pass the barriers in the graph."""
    HEADS_HALVED = "mamba3_mimo.heads_halved"
    """Whether heads too wide for one block ran as two heads of half the width (lane cuda)."""
    ATTESTED_FROM = "mamba3_mimo.attested_from"
    """Source of lane cuda's facts: sass, source, or both."""
    SOURCE_HASH = "mamba3_mimo.source_hash"
    """SHA-256 of the generated CUDA, recorded per pass under this name plus .forward or .backward."""
    BINARY_HASH = "mamba3_mimo.binary_hash"
    """SHA-256 of the machine instructions, named like `SOURCE_HASH`."""
    KERNELS_COMPILED = "mamba3_mimo.kernels_compiled"
    """Kernels of lane cuda that this process compiled."""
    KERNELS_LOADED = "mamba3_mimo.kernels_loaded"
    """Kernels of lane cuda that this process loaded from TileLang's cache on disk."""
    PEER = "mamba3_mimo.peer"
    """Releases of mamba-ssm and TileLang that lane peer ran."""
    PEER_KERNELS = "mamba3_mimo.peer_kernels"
    """Which kernels of lane peer ran: dense, or packed (several documents in a row)."""

    @classmethod
    def of(cls, name: str) -> "ScanFact":
        """Return the fact with the short name `name`, such as a switch. Raises KeyError for another name."""
        return cls[name.upper()]
