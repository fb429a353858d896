"""What the lane says to a problem before it runs: the reason why it refuses, or the kernels that it needs."""

from dataclasses import fields
from typing import Any, NamedTuple

from kernels.backends import Lane
from kernels.errors import KernelError
from kernels.mamba3_mimo import ScanOptions, supports
from kernels.mamba3_mimo.cuda.compiled import needed
from kernels.mamba3_mimo.cuda.scan import Scan
from kernels.mamba3_mimo.cuda.shape import ScanShape
from kernels.mamba3_mimo.cuda.variant import Variant
from kernels.mamba3_mimo.fuzz.problems import Problem
from kernels.mamba3_mimo.fuzz.tensors import shapes_only


class KernelKey(NamedTuple):
    """One kernel to compile: arguments of compiled.kernel."""

    name: str
    shape: ScanShape
    variant: Variant
    num_tokens: int


def options(problem: Problem) -> ScanOptions:
    """Return how the problem's scan is executed."""
    return ScanOptions(lane=Lane.CUDA, **{name: value for name, value in _typed(problem)})


def _typed(problem: Problem) -> list[tuple[str, Any]]:
    return list(problem.switches.items())


def refusal(problem: Problem) -> str | None:
    """Return why the lane does not run the problem, or None; nothing is compiled and no GPU is needed."""
    reason = supports(options(problem), "cuda")
    if reason is not None:
        return reason
    try:
        _scan(problem)
    except KernelError as error:
        return str(error)
    return None


def kernels(problem: Problem) -> list[KernelKey]:
    """Return the kernels of a problem that is not refused."""
    scan = _scan(problem)
    names = needed("forward", scan.shape, scan.variant)
    if problem.wanted != ():
        names += needed("backward", scan.shape, scan.variant)
    return [KernelKey(name, scan.shape, scan.variant, scan.tokens) for name in names]


def _scan(problem: Problem) -> Scan:
    """Return the lane's scan of tensors without data."""
    chosen = options(problem)
    switches = {field.name: getattr(chosen, field.name) for field in fields(Variant) if hasattr(chosen, field.name)}
    return Scan(shapes_only(problem), Variant(**switches))
