"""How one scan is executed, and why a combination cannot be."""

from dataclasses import dataclass

from kernels.backends import Lane, NodeClass, lane_refusal

SCHEDULES = ("sequential", "chunk_parallel")
CUDA_FEATURES = ("tma", "warp_specialize", "aggressive_smem_merge", "layout_2d")
"""Switches of generated GPU kernels. The reference lane has none of them."""

_NODE_CLASS_OF_DEVICE = {"cpu": NodeClass.CPU, "cuda": NodeClass.H200, "xla": NodeClass.TPU_V6E}


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """One way to execute the scan; never changes its mathematics."""

    lane: Lane = Lane.REFERENCE
    """Implementation family."""
    schedule: str = "chunk_parallel"
    """`sequential` walks time step by step, `chunk_parallel` computes all chunks at once."""
    chunk_size: int = 16
    """Tokens per chunk; read by chunk_parallel only."""
    psiv_cache: bool = False
    """Save PsiV = v * psi for the backward pass instead of recomputing it."""
    features: tuple[str, ...] = ()
    """Kernel switches that are on, out of `CUDA_FEATURES`."""


def supports(options: ScanOptions, device: str) -> str | None:
    """Return why `options` cannot run on torch device type `device`, or None when it can."""
    if device not in _NODE_CLASS_OF_DEVICE:
        return f"device type '{device}' is unknown; known: {', '.join(_NODE_CLASS_OF_DEVICE)}"
    refusal = lane_refusal(options.lane, _NODE_CLASS_OF_DEVICE[device])
    if refusal is not None:
        return refusal
    if options.features:
        return f"feature '{options.features[0]}' belongs to generated GPU kernels; lane '{options.lane}' has none"
    if options.schedule not in SCHEDULES:
        return f"schedule '{options.schedule}' is unknown; known: {', '.join(SCHEDULES)}"
    if options.chunk_size < 1:
        return f"chunk_size is {options.chunk_size}; allowed: at least 1"
    return None
