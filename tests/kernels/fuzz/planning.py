"""Refusal and kernels of a problem, known before it runs."""

from ablate.kernels import facts
from ablate.kernels.backends import Lane
from ablate.kernels.errors import KernelError
from ablate.kernels.mamba3_mimo import supports
from ablate.kernels.mamba3_mimo.cuda.backward.lifted_layout import lifts
from ablate.kernels.mamba3_mimo.cuda.host.compiled import Direction, build, for_any_size, needed
from ablate.kernels.mamba3_mimo.cuda.host.op import dtype_refusal
from ablate.kernels.mamba3_mimo.cuda.host.scan import Scan
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
from ablate.kernels.scan_switches import ScanFact, ScanSwitches
from tests.kernels.fuzz.problems import ScanProblem
from tests.kernels.fuzz.tensors import shapes_only


def switches(problem: ScanProblem) -> ScanSwitches:
    """Return the switches of the problem's scan."""
    return ScanSwitches(lane=Lane.CUDA, **problem.switches)  # type: ignore[arg-type]


def refusal(problem: ScanProblem) -> str | None:
    """Return why the lane refuses the problem, or None. Compiles nothing and needs no GPU."""
    reason = supports(switches(problem), "cuda")
    if reason is not None:
        return reason
    try:
        _scan(problem)
        return dtype_refusal(shapes_only(problem))
    except KernelError as error:
        return str(error)


def compiled(problem: ScanProblem) -> tuple[int, int]:
    """Compile the kernels of an allowed problem; return (compiled kernels, kernels from disk)."""
    scan = _scan(problem)
    with facts.collect() as seen:
        for direction in _directions(problem):
            build(direction, scan.shape, scan.variant)
    return int(seen.get(ScanFact.KERNELS_COMPILED, 0)), int(seen.get(ScanFact.KERNELS_LOADED, 0))


def kernels(problem: ScanProblem) -> frozenset[tuple[str, ScanShape, Variant]]:
    """Return the keys of an allowed problem's kernels. Equal keys are one kernel."""
    scan = _scan(problem)
    return frozenset(
        for_any_size(name, scan.shape, scan.variant)
        for direction in _directions(problem)
        for name in needed(direction, scan.shape, scan.variant)
    )


def sizes(problem: ScanProblem) -> ScanShape:
    """Return the sizes of an allowed problem's kernels."""
    return _scan(problem).shape


def walk(problem: ScanProblem) -> str:
    """Return the form of an allowed problem's backward walk, see docs/kernels.md."""
    scan = _scan(problem)
    if "backward" not in _directions(problem):
        return "none"
    if scan.variant.warp_specialize:
        return "lifted, a group copies"
    return "lifted" if lifts(scan.shape, scan.variant) else "general"


def _directions(problem: ScanProblem) -> tuple[Direction, ...]:
    return ("forward",) if problem.wanted == () else ("forward", "backward")


def _scan(problem: ScanProblem) -> Scan:
    """Return the lane's scan of tensors without data."""
    return Scan(shapes_only(problem), Variant(**vars(switches(problem))))
