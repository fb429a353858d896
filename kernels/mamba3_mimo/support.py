"""Lanes of the scan: how each lane runs the scan, and why it refuses switches."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec

from torch import Tensor

from ablate.kernels.backends import Lane, device_refusal
from ablate.kernels.mamba3_mimo import peer
from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from ablate.kernels.mamba3_mimo.operands import contained
from ablate.kernels.mamba3_mimo.recompute import Form, scan
from ablate.kernels.mamba3_mimo.reference import chunk_parallel, step_form
from ablate.kernels.scan_switches import SCHEDULES, ScanSwitches
from ablate.kernels.xla import device as xla_device


@lru_cache(maxsize=1024)
def supports(switches: ScanSwitches, device: str) -> str | None:
    """Return why `switches` cannot run on torch device type `device`, or None if they can.

    For lane cuda this checks one shape that suits the chunk size. The scan itself checks its own shape.
    """
    refusal = device_refusal(switches.lane, device)
    if refusal is not None:
        return refusal
    if switches.schedule not in SCHEDULES:
        return f"schedule '{switches.schedule}' is unknown; known: {', '.join(SCHEDULES)}"
    if switches.chunk_size < 1:
        return f"chunk_size is {switches.chunk_size}; allowed: at least 1"
    return LANES[switches.lane].refusal(switches)


def _reference(inputs: ScanInputs, switches: ScanSwitches, return_final_state: bool) -> tuple[Tensor, Tensor | None]:
    sequential = switches.schedule == "sequential"
    form: Form = step_form if sequential else partial(chunk_parallel, chunk_size=switches.chunk_size)
    inputs, broken_BS = contained(inputs)
    out, state_BHNP = scan(inputs, form, psiv_cache=switches.psiv_cache)
    if broken_BS is not None:
        out = out.masked_fill(broken_BS.view(*broken_BS.shape, *(1 for _ in out.shape[2:])), math.nan)
        state_BHNP = state_BHNP.masked_fill(broken_BS[:, -1].view(-1, 1, 1, 1), math.nan)
    return out, state_BHNP if return_final_state else None


def _peer(inputs: ScanInputs, switches: ScanSwitches, return_final_state: bool) -> tuple[Tensor, Tensor | None]:
    return peer.peer_scan(
        inputs,
        chunk_size=switches.chunk_size,
        warp_specialize=switches.warp_specialize,
        return_final_state=return_final_state,
    )


def _peer_refusal(switches: ScanSwitches) -> str | None:
    if switches.schedule != "sequential":
        return f"schedule is '{switches.schedule}'; allowed for lane 'peer': sequential, one block walks all chunks"
    if switches.psiv_cache:
        return "psiv_cache is on; allowed for lane 'peer': off, the official kernels recompute PsiV"
    return peer.import_refusal()


def run_cuda(inputs: ScanInputs, switches: ScanSwitches, return_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """Run lane cuda, eagerly or as an operator of a graph. It raises KernelUnsupported when it runs."""
    from ablate.kernels.mamba3_mimo.cuda.host import op  # lazy: a CPU node has no tilelang

    return op.scan(inputs, switches, return_final_state)


def _cuda_refusal(switches: ScanSwitches) -> str | None:
    if find_spec("tilelang") is None:
        return "lane 'cuda' needs the package tilelang, which is not installed here"
    from ablate.kernels.mamba3_mimo.cuda.host.lengths import LENGTHS
    from ablate.kernels.mamba3_mimo.cuda.host.refusals import refusal
    from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant

    chunk = switches.chunk_size
    rank = max(1, 64 // chunk)
    length = switches.superchunk or max(LENGTHS)
    shape = ScanShape(B=1, S=length, H=1, G=1, N=64, P=64, R=rank, A=16, C=chunk, L=length)
    return refusal(Variant(**vars(switches)), shape)


def _xla(inputs: ScanInputs, switches: ScanSwitches, return_final_state: bool) -> tuple[Tensor, Tensor | None]:
    from ablate.kernels.mamba3_mimo.xla.scan import scan as xla_scan

    return xla_scan(inputs, switches, return_final_state)


def _xla_refusal(_: ScanSwitches) -> str | None:
    return xla_device.version_refusal()


@dataclass(frozen=True, kw_only=True)
class LaneOfScan:
    """One implementation of the scan."""

    run: Callable[[ScanInputs, ScanSwitches, bool], tuple[Tensor, Tensor | None]]
    """(inputs, switches, whether to return the final state) -> (o, ScanState.state [B,H,N,P] or None)."""
    refusal: Callable[[ScanSwitches], str | None] = lambda _: None
    """Switches -> why the lane cannot run them on a suitable device, or None if it can."""


LANES: dict[Lane, LaneOfScan] = {
    Lane.REFERENCE: LaneOfScan(run=_reference),
    Lane.CUDA: LaneOfScan(run=run_cuda, refusal=_cuda_refusal),
    Lane.XLA: LaneOfScan(run=_xla, refusal=_xla_refusal),
    Lane.PEER: LaneOfScan(run=_peer, refusal=_peer_refusal),
}
"""Implementations by lane."""
