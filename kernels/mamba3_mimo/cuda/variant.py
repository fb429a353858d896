"""Which of the possible kernels to run: the gates of the CUDA lane, and why a value is refused."""

from dataclasses import dataclass

from kernels.mamba3_mimo.cuda.shape import ScanShape


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
    reasons = (
        (not variant.tma, "tma off is not implemented: q, k and states are loaded by bulk tensor copies only"),
        (variant.warp_specialize, "warp_specialize is not implemented: one warp group does loads and arithmetic"),
        (
            variant.pipeline_stages > 0,
            "pipeline_stages is not implemented: one chunk's copies are in flight",
        ),
        (
            variant.aggressive_smem_merge,
            "aggressive_smem_merge is refused: with a loop of run-time length the merged buffers gave NaN (S = 1001)",
        ),
        (variant.psiv_cache, "psiv_cache is not implemented: PsiV is recomputed in every pass"),
        (shape.M != 64, f"chunk_size * rank is {shape.M}; allowed: 64, one row block of the matrix unit"),
        (shape.C % 8 > 0, f"chunk_size is {shape.C}; allowed: a multiple of 8"),
        (shape.L % shape.C > 0, f"superchunk is {shape.L}; allowed: a multiple of chunk_size = {shape.C}"),
        (
            (shape.N, shape.P) != (64, 64),
            f"N={shape.N}, P={shape.P}; allowed: 64 and 64, since tiles of both widths share buffers",
        ),
        (shape.A % 16 > 0, f"{shape.A} rotary angles; allowed: multiples of 16, two groups of eight per row"),
    )
    return next((reason for refused, reason in reasons if refused), None)
