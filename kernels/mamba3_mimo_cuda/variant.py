"""Which of the possible kernels to run: the gates of the CUDA lane, and why a value is refused."""

from dataclasses import dataclass

from kernels.mamba3_mimo_cuda.shape import ScanShape


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Switches of the generated kernels. None changes the mathematics."""

    tma: bool = True
    """Load tiles with the bulk tensor copy engine. Off is not implemented."""
    warp_specialize: bool = False
    """Give loads to a warp group of their own."""
    aggressive_smem_merge: bool = False
    """Let the compiler overlap shared buffers whose lifetimes do not meet."""
    psiv_cache: bool = False
    """Save PsiV in the forward pass and load it in the backward pass."""
    save_states: bool = True
    """Keep the bf16 state of every chunk from the forward pass (8 KiB each) instead of recomputing it."""
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
    if not variant.tma:
        return "tma off is not implemented: q, k and states are loaded by bulk tensor copies only"
    if variant.warp_specialize or variant.pipeline_stages:
        return "warp_specialize and pipeline_stages are not implemented: one warp group, next chunk's copies in flight"
    if variant.aggressive_smem_merge:
        return "aggressive_smem_merge is refused: with a loop of run-time length the merged buffers gave NaN (S = 1001)"
    if variant.psiv_cache:
        return "psiv_cache is not implemented: PsiV is recomputed in every pass"
    if shape.M != 64:
        return f"chunk_size * rank is {shape.M}; allowed: 64, one row block of the matrix unit"
    if shape.L % shape.C:
        return f"superchunk is {shape.L}; allowed: a multiple of chunk_size = {shape.C}"
    if shape.N != 64 or shape.P != 64:
        return f"N={shape.N}, P={shape.P}; allowed: 64 and 64, since tiles of both widths share buffers"
    if shape.A % 16:
        return f"{shape.A} rotary angles; allowed: multiples of 16, two groups of eight per row"
    return None
