"""Does a lane work here? One small scan with all of its gradients, compared with float64."""

import torch

from kernels.backends import GENERATED_LANES, Lane
from kernels.errors import KernelUnsupported
from kernels.mamba3_mimo import criterion
from kernels.mamba3_mimo.accuracy import Case, make_grad, make_inputs, outputs, scanned
from kernels.mamba3_mimo.support import supports
from kernels.scan_switches import ScanSwitches

CASE = Case(B=1, S=128, H=2)
"""A shape that every lane can run, with N = P = 64 and R = 4."""


def small_run_problem(lane: Lane, device: torch.device) -> str | None:
    """Run `CASE` on `lane`; return why it does not work on `device`, None when it ran and was right."""
    switches = ScanSwitches(lane=lane, schedule="sequential" if lane is Lane.PEER else "chunk_parallel")
    refusal = supports(switches, device.type)
    if refusal is not None:
        return refusal
    inputs = make_inputs(CASE, "cpu")
    grad_out = make_grad(inputs, CASE.seed)
    if lane not in GENERATED_LANES:  # kernels take bfloat16; elsewhere its rounding would be all that is seen
        inputs, grad_out = inputs.with_tensors(tuple(tensor.float() for tensor in inputs.tensors())), grad_out.float()
    moved = inputs.with_tensors(tuple(tensor.to(device) for tensor in inputs.tensors()))
    try:
        got = outputs(scanned(switches), moved, grad_out.to(device))
    except KernelUnsupported as error:
        return str(error)
    wrong = criterion.wrong({name: tensor.cpu() for name, tensor in got.items()}, inputs, grad_out)
    return f"it ran, and is wrong in {', '.join(wrong)}" if wrong else None
