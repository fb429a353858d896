"""Why the CUDA lane cannot run a variant of the kernels on a shape."""

from collections.abc import Iterator
from functools import lru_cache

from ablate.kernels import scan_switches
from ablate.kernels.mamba3_mimo.cuda.backward import gradients, lifted_layout
from ablate.kernels.mamba3_mimo.cuda.shape import MOST_BLOCKS, ScanShape, Variant
from ablate.kernels.scan_switches import HEADS_IN_TURN, PIPELINE_STAGES, SCHEDULES

RANKS, STATE_SIZES, HEAD_WIDTHS, CHUNK_ROWS = (1, 2, 4, 8), (16, 32, 64, 128, 256), (32, 64, 128), (32, 64, 128)
CHUNK_SIZES = tuple(size for size in scan_switches.CHUNK_SIZES if size <= 64)


@lru_cache(maxsize=256)
def refusal(variant: Variant, shape: ScanShape) -> str | None:
    """Return why `variant` cannot run `shape`, or None if it can."""
    return next((reason for refused, reason in _all_refusals(variant, shape) if refused), None)


def _all_refusals(variant: Variant, shape: ScanShape) -> Iterator[tuple[bool, str]]:
    yield from _host_refusals(variant, shape)
    for kernels_of_walk in (gradients, lifted_layout):
        yield from kernels_of_walk.refusals(variant, shape)


def _host_refusals(v: Variant, s: ScanShape) -> tuple[tuple[bool, str], ...]:
    """Return the limits of all kernels of this lane."""
    return (
        (v.schedule not in SCHEDULES, f"schedule is '{v.schedule}'; allowed: {', '.join(SCHEDULES)}"),
        (s.R not in RANKS, f"rank is {s.R}; allowed: {_listed(RANKS)}"),
        (s.N not in STATE_SIZES, f"state size is {s.N}; allowed: {_listed(STATE_SIZES)}"),
        (s.P not in HEAD_WIDTHS, f"head width is {s.P}; allowed: {_listed(HEAD_WIDTHS)}"),
        (s.C not in CHUNK_SIZES, f"chunk_size is {s.C}; allowed: {_listed(CHUNK_SIZES)}"),
        (
            s.M not in CHUNK_ROWS,
            f"chunk_size * rank is {s.C} * {s.R} = {s.M}; allowed: {_listed(CHUNK_ROWS)}, sizes of the matrix unit",
        ),
        (
            s.N <= 32 and s.M > 64,
            f"chunk_size * rank is {s.M} with N = {s.N}; allowed: 32, 64, because the compiler gives one tile of the "
            "outputs two layouts",
        ),
        (
            v.schedule == "chunk_parallel" and (s.L < s.C or s.L % s.C > 0 or (s.L % 64 > 0 and 64 % s.L > 0)),
            f"superchunk is {s.L}; allowed: a multiple of chunk_size = {s.C} that is 8, 16, 32 or a multiple of 64",
        ),
        (
            s.walks > MOST_BLOCKS,
            f"batch * super-chunks of a row is {s.walks}; allowed: {MOST_BLOCKS}, the most blocks of a grid",
        ),
        (
            v.pipeline_stages not in PIPELINE_STAGES,
            f"pipeline_stages is {v.pipeline_stages}; allowed: {_listed(PIPELINE_STAGES)}",
        ),
        (
            v.heads_in_turn not in HEADS_IN_TURN,
            f"heads_in_turn is {v.heads_in_turn}; allowed: {_listed(HEADS_IN_TURN)}",
        ),
        (
            v.psiv_cache and v.remat,
            "psiv_cache with remat; allowed: one of them, because one saves more between the passes and the other less",
        ),
    )


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
