"""The scan's switches and facts: what can be asked of it and what it says about itself. Torch-free.

Importing an operation imports torch, which service and experiments must not do: what they need to know about the scan
is declared here, once, and its kernels read it from here too.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias, get_args

from kernels.backends import Lane

Schedule: TypeAlias = Literal["sequential", "chunk_parallel"]

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
CHUNK_SIZES = (8, 16, 32, 64, 128, 256)
"""Tokens per chunk that a configuration can have; a lane may refuse some."""
MAX_SUPERCHUNK = 4096
"""Most tokens per super-chunk that a configuration can have, a multiple of its chunk size."""
PIPELINE_STAGES = (0, 1, 2)
HEADS_IN_TURN = (0, 1, 2, 4)
COMPILER = "kernels.mamba3_mimo.cuda.host.compiled"
"""Module of lane cuda that, once imported, tells how many kernels this process has made ready."""


@dataclass(frozen=True, kw_only=True)
class ScanSwitches:
    """One way to execute the scan: changes speed and memory, never the mathematics.

    The switches from `superchunk` on are read by lane cuda alone. What cannot run is refused by the operation's
    `supports`, with the reason.
    """

    lane: Lane = Lane.REFERENCE
    """Implementation family."""
    schedule: Schedule = "chunk_parallel"
    """`sequential` walks time in order, step by step (reference) or chunk by chunk (cuda, xla); `chunk_parallel`
    computes all chunks (reference, xla) or super-chunks (cuda) at once."""
    chunk_size: int = 16
    """Tokens per chunk C; not read by the reference lane's sequential schedule."""
    psiv_cache: bool = False
    """Save PsiV = v * psi in the forward pass for the backward pass, instead of recomputing it there."""
    remat: bool = False
    """Make values again in the backward pass instead of keeping them: lane xla what torch's minimum cut decides; lane
    cuda the states that enter the chunks, from those of the super-chunks. Off: what the backward pass reads is kept."""
    superchunk: int = 0
    """Tokens per super-chunk: what one block of the chunk_parallel schedule walks; the sequential one has none. 0: as
    many as suit the sizes of the scan, where that is a whole row with the kernels of the sequential schedule."""
    heads_in_turn: int = 0
    """Heads of a group that a block of the backward walk takes one after another, adding up their gradients of q and k.
    0: as many as suit the sizes of the scan."""
    pipeline_stages: int = 1
    """Chunks whose tiles are in flight ahead of the arithmetic; 0 loads synchronously."""
    fast_math: bool = True
    """Let the compiler use the hardware's approximate exp2 and tanh."""
    tma: bool = True
    """Load tiles with the tensor memory accelerator, the bulk tensor copy engine; off: cp.async."""
    warp_specialize: bool = False
    """Let a warp group of the backward walk do nothing but copy, while the others compute."""
    aggressive_smem_merge: bool = False
    """Let the compiler overlap shared buffers whose lifetimes do not meet."""
    layout_2d: bool = True
    """Keep tiles of q and k in shared memory as swizzled [rank * time, state]; off: plain [rank, time, state]."""


class ScanFact(StrEnum):
    """Names of the facts that a scan records while it runs, as receipts keep them.

    Those named like a switch tell what was live, "mixed" where kernels or passes differ. Lane cuda reads the ones from
    `PIPELINE_STAGES` to `PSIV_CACHE` from its machine code.
    """

    LANE = "mamba3_mimo.lane"
    SCHEDULE = "mamba3_mimo.schedule"
    DTYPE = "mamba3_mimo.dtype"
    """Dtype of q, k, v and z where the scan takes them."""
    CHUNK_SIZE = "mamba3_mimo.chunk_size"
    SUPERCHUNK = "mamba3_mimo.superchunk"
    SUPERCHUNK_OF_SIZES = "mamba3_mimo.superchunk_of_sizes"
    """Tokens per super-chunk that suit the sizes of the scan that ran, whatever was asked for (lane cuda); 0: the
    whole row, walked by one block."""
    HEADS_IN_TURN = "mamba3_mimo.heads_in_turn"
    HEADS_IN_TURN_OF_SIZES = "mamba3_mimo.heads_in_turn_of_sizes"
    """Heads in turn that suit the sizes of the scan that ran, whatever was asked for (lane cuda)."""
    PIPELINE_STAGES = "mamba3_mimo.pipeline_stages"
    FAST_MATH = "mamba3_mimo.fast_math"
    TMA = "mamba3_mimo.tma"
    WARP_SPECIALIZE = "mamba3_mimo.warp_specialize"
    AGGRESSIVE_SMEM_MERGE = "mamba3_mimo.aggressive_smem_merge"
    LAYOUT_2D = "mamba3_mimo.layout_2d"
    PSIV_CACHE = "mamba3_mimo.psiv_cache"
    PSIV_SAVED_BYTES = "mamba3_mimo.psiv_saved_bytes"
    """Bytes of PsiV kept between the passes; absent when it is recomputed."""
    PSIV_TRAFFIC_BYTES = "mamba3_mimo.psiv_traffic_bytes"
    """Bytes of the kept PsiV that kernels write and read (lane cuda)."""
    PSIV_RECOMPUTES = "mamba3_mimo.psiv_recomputes"
    """Backward passes that recomputed PsiV."""
    REMAT = "mamba3_mimo.remat"
    """Whether backward passes did operations of the forward pass again, those of PsiV apart (lane xla), or launched its
    kernel to make the states of the chunks again (lane cuda)."""
    HANDED_BYTES = "mamba3_mimo.handed_bytes"
    """Bytes that forward passes hand to backward passes, gradients included (lane xla, chunk_parallel): what passes the
    barriers in the graph has to be as much."""
    HEADS_HALVED = "mamba3_mimo.heads_halved"
    """Whether heads too wide for one block were run as two of half the width (lane cuda)."""
    ATTESTED_FROM = "mamba3_mimo.attested_from"
    """What lane cuda's facts were read from: sass, source, or both."""
    SOURCE_HASH = "mamba3_mimo.source_hash"
    """SHA-256 of the generated CUDA; recorded for each pass as this name with .forward or .backward behind it."""
    BINARY_HASH = "mamba3_mimo.binary_hash"
    """SHA-256 of the machine instructions; named like `SOURCE_HASH`."""
    KERNELS_COMPILED = "mamba3_mimo.kernels_compiled"
    """Kernels of lane cuda that this process compiled."""
    KERNELS_LOADED = "mamba3_mimo.kernels_loaded"
    """Kernels of lane cuda that were found in TileLang's cache on disk."""
    PEER = "mamba3_mimo.peer"
    """Releases of mamba-ssm and TileLang that lane peer ran."""
    PEER_KERNELS = "mamba3_mimo.peer_kernels"
    """Which kernels of lane peer ran: dense, or packed (several documents in a row)."""

    @classmethod
    def of(cls, name: str) -> "ScanFact":
        """Return the fact with the short name `name`, such as a switch. Raises KeyError when there is none."""
        return cls[name.upper()]
