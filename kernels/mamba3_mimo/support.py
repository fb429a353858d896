"""Why a scan cannot run with the switches it was asked to run with."""

from functools import lru_cache
from importlib.util import find_spec

from kernels.backends import Lane, device_refusal
from kernels.mamba3_mimo import peer
from kernels.scan import SCHEDULES, ScanSwitches


@lru_cache(maxsize=1024)
def supports(switches: ScanSwitches, device: str) -> str | None:
    """Return why `switches` cannot run on torch device type `device`, or None when they can.

    Of the cuda lane this asks for one shape that suits the chunk size; other shapes are asked about when they run.
    """
    refusal = device_refusal(switches.lane, device)
    if refusal is not None:
        return refusal
    if switches.schedule not in SCHEDULES:
        return f"schedule '{switches.schedule}' is unknown; known: {', '.join(SCHEDULES)}"
    if switches.chunk_size < 1:
        return f"chunk_size is {switches.chunk_size}; allowed: at least 1"
    if switches.lane is Lane.PEER:
        return _peer_refusal(switches)
    return _cuda_refusal(switches) if switches.lane is Lane.CUDA else None


def _peer_refusal(switches: ScanSwitches) -> str | None:
    if switches.schedule != "sequential":
        return f"schedule is '{switches.schedule}'; allowed for lane 'peer': sequential, one block walks all chunks"
    if switches.psiv_cache:
        return "psiv_cache is on; allowed for lane 'peer': off, the official kernels recompute PsiV"
    return peer.missing()


def _cuda_refusal(switches: ScanSwitches) -> str | None:
    if find_spec("tilelang") is None:
        return "lane 'cuda' needs the package tilelang, which is not installed here"
    from kernels.mamba3_mimo.cuda.shape import ScanShape  # tilelang is imported only where it is there
    from kernels.mamba3_mimo.cuda.variant import Variant, refusal

    chunk = switches.chunk_size
    rank = max(1, 64 // chunk)
    shape = ScanShape(B=1, S=8 * chunk, H=1, G=1, N=64, P=64, R=rank, A=16, C=chunk, L=switches.superchunk)
    return refusal(Variant(**vars(switches)), shape)
