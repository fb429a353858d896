"""Which of the possible kernels to run: the gates of the CUDA lane, and why a value is refused."""

from dataclasses import dataclass

from kernels.mamba3_mimo_cuda.shape import ScanShape


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Switches of the generated kernels. None changes the mathematics."""

    tma: bool = False
    """Load tiles with the bulk tensor copy engine."""
    warp_specialize: bool = False
    """Give loads to a warp group of their own."""
    aggressive_smem_merge: bool = False
    """Let the compiler overlap shared buffers whose lifetimes do not meet."""
    psiv_cache: bool = False
    """Save PsiV in the forward pass and load it in the backward pass."""
    fast_math: bool = True
    """Use the hardware's approximate exp2 and tanh."""
    chunk_size: int = 16
    """Tokens per chunk."""
    superchunk: int = 256
    """Tokens per super-chunk."""
    pipeline_stages: int = 0
    """Tiles in flight; 0 loads synchronously."""


def refusal(variant: Variant, shape: ScanShape) -> str | None:
    """Return why `variant` cannot run `shape`, or None when it can."""
    if variant.tma or variant.warp_specialize or variant.pipeline_stages:
        return "tma, warp_specialize and pipeline_stages are not implemented: loads go through registers"
    if variant.psiv_cache:
        return "psiv_cache is not implemented: PsiV is recomputed in every pass"
    if shape.M != 64:
        return f"chunk_size * rank is {shape.M}; allowed: 64, one row block of the matrix unit"
    if shape.L % shape.C:
        return f"superchunk is {shape.L}; allowed: a multiple of chunk_size = {shape.C}"
    if shape.N % 64 or shape.P % 64:
        return f"N={shape.N}, P={shape.P}; allowed: multiples of 64"
    return None
