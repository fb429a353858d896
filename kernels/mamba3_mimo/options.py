"""How one scan is executed, and why a combination cannot be."""

from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.util import find_spec

from kernels.backends import Lane, NodeClass, lane_refusal
from kernels.mamba3_mimo import peer

SCHEDULES = ("sequential", "chunk_parallel")

_NODE_CLASS_OF_DEVICE = {"cpu": NodeClass.CPU, "cuda": NodeClass.H200, "xla": NodeClass.TPU_V6E}


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """One way to execute the scan; never changes its mathematics. The switches from `superchunk` on are cuda's."""

    lane: Lane = Lane.REFERENCE
    """Implementation family."""
    schedule: str = "chunk_parallel"
    """`sequential` walks time in order, step by step (reference) or chunk by chunk (cuda); `chunk_parallel` computes
    all chunks (reference) or super-chunks (cuda) at once."""
    chunk_size: int = 16
    """Tokens per chunk; not read by the reference lane's sequential schedule."""
    psiv_cache: bool = False
    """Save PsiV = v * psi for the backward pass instead of recomputing it."""
    superchunk: int = 256
    """Tokens per super-chunk: what one block of the chunk_parallel schedule walks."""
    pipeline_stages: int = 1
    """Chunks whose tiles are in flight ahead of the arithmetic; 0 loads synchronously."""
    fast_math: bool = True
    """Let the compiler use the hardware's approximate functions."""
    tma: bool = True
    """Load tiles with the bulk tensor copy engine."""
    warp_specialize: bool = False
    """Give loads, or a share of the arithmetic, to a warp group of their own."""
    aggressive_smem_merge: bool = False
    """Let the compiler overlap shared buffers whose lifetimes do not meet."""
    layout_2d: bool = True
    """Keep tiles in shared memory as [rank * time, width] instead of [rank, time, width]."""


@lru_cache(maxsize=1024)
def supports(options: ScanOptions, device: str) -> str | None:
    """Return why `options` cannot run on torch device type `device`, or None when they can.

    Of the cuda lane this asks for one shape that suits the chunk size; other shapes are asked about when they run.
    """
    if device not in _NODE_CLASS_OF_DEVICE:
        return f"device type '{device}' is unknown; known: {', '.join(_NODE_CLASS_OF_DEVICE)}"
    refusal = lane_refusal(options.lane, _NODE_CLASS_OF_DEVICE[device])
    if refusal is not None:
        return refusal
    if options.schedule not in SCHEDULES:
        return f"schedule '{options.schedule}' is unknown; known: {', '.join(SCHEDULES)}"
    if options.chunk_size < 1:
        return f"chunk_size is {options.chunk_size}; allowed: at least 1"
    if options.lane is Lane.PEER:
        return _peer_refusal(options)
    return _cuda_refusal(options) if options.lane is Lane.CUDA else None


def _peer_refusal(options: ScanOptions) -> str | None:
    if options.schedule != "sequential":
        return f"schedule is '{options.schedule}'; allowed for lane 'peer': sequential, one block walks all chunks"
    if options.psiv_cache:
        return "psiv_cache is on; allowed for lane 'peer': off, the official kernels recompute PsiV"
    return peer.missing()


def _cuda_refusal(options: ScanOptions) -> str | None:
    if find_spec("tilelang") is None:
        return "lane 'cuda' needs the package tilelang, which is not installed here"
    from kernels.mamba3_mimo.cuda.shape import ScanShape  # tilelang is imported only where it is there
    from kernels.mamba3_mimo.cuda.variant import Variant, refusal

    switches = {field.name: getattr(options, field.name) for field in fields(Variant) if hasattr(options, field.name)}
    chunk = options.chunk_size
    rank = max(1, 64 // chunk)
    shape = ScanShape(B=1, S=8 * chunk, H=1, G=1, N=64, P=64, R=rank, A=16, C=chunk, L=options.superchunk)
    return refusal(Variant(**switches), shape)
