"""What the lane says to a problem before it runs: the reason why it refuses, and what it compiles for it."""

from dataclasses import fields

from kernels import facts
from kernels.backends import Lane
from kernels.errors import KernelError
from kernels.mamba3_mimo import ScanOptions, supports
from kernels.mamba3_mimo.cuda.compiled import Direction, build
from kernels.mamba3_mimo.cuda.scan import Scan
from kernels.mamba3_mimo.cuda.variant import Variant
from kernels.mamba3_mimo.fuzz.problems import Problem
from kernels.mamba3_mimo.fuzz.tensors import shapes_only


def options(problem: Problem) -> ScanOptions:
    """Return how the problem's scan is executed."""
    return ScanOptions(lane=Lane.CUDA, **problem.switches)  # type: ignore[arg-type]


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


def compiled(problem: Problem) -> tuple[int, int]:
    """Compile what a problem needs that is not refused; return how many kernels were new, and how many on disk."""
    scan = _scan(problem)
    directions: tuple[Direction, ...] = ("forward",) if problem.wanted == () else ("forward", "backward")
    with facts.collect() as seen:
        for direction in directions:
            build(direction, scan.shape, scan.variant, scan.tokens)
    return int(seen.get(facts.KERNELS_COMPILED, 0)), int(seen.get(facts.KERNELS_LOADED, 0))


def _scan(problem: Problem) -> Scan:
    """Return the lane's scan of tensors without data."""
    chosen = options(problem)
    switches = {field.name: getattr(chosen, field.name) for field in fields(Variant) if hasattr(chosen, field.name)}
    return Scan(shapes_only(problem), Variant(**switches))
