"""The problems that the CUDA lane is measured on against the reference lane; importable without a GPU.

Kernels are for any batch and length, so problems that differ in nothing else share theirs. Where no more is wanted of
a problem, it therefore has four heads in one group, and 1001 tokens, which one block of the sequential schedule walks
as 1024.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest

from ablate.experiments.design.gate import Claim
from ablate.experiments.design.gates import GATES
from ablate.kernels.mamba3_mimo.cuda.shape import Variant
from tests.kernels.fuzz.problems import ScanProblem
from tests.kernels.problem import Case

Problem = tuple[Case, Variant]

PLAIN = Case(B=2, S=1001, H=4)
LONG = Case(B=1, S=8191, H=16)

CASES = {
    "plain": PLAIN,
    "cumulated": replace(PLAIN, cumulated=True),
    "documents": replace(PLAIN, documents=4),
    "one_angle_set": replace(PLAIN, shared_angles=True),
    "documents_one_angle_set": replace(PLAIN, documents=4, shared_angles=True),
    "no_skip": replace(PLAIN, without=("D",)),
    "no_gate": replace(PLAIN, without=("z", "zeta")),
    "per_rank": replace(PLAIN, without=("phi",)),
    "bare": replace(PLAIN, without=("z", "zeta", "phi", "D")),
    "groups": replace(PLAIN, G=2),
    "full_rotary": replace(PLAIN, rope=1.0),
    "odd_heads": replace(PLAIN, H=5, shared_angles=True),
    "one_token": replace(PLAIN, S=1),
    "five_tokens": replace(PLAIN, S=5),
    "two_tokens_wide": Case(B=3, S=2, H=4, N=128),
    "long": LONG,
    "long_cumulated": replace(LONG, H=4, cumulated=True),
    "long_documents": replace(LONG, documents=4),
}

OFFICIAL = (
    (16, 64, 4, 8), (32, 64, 4, 16), (64, 64, 4, 16), (128, 64, 4, 16), (256, 64, 4, 8), (64, 128, 4, 16),
    (128, 32, 4, 16), (128, 128, 4, 8), (128, 64, 8, 8), (128, 64, 2, 32), (128, 64, 1, 64),
)  # fmt: skip
"""(N, P, R, chunk_size) of the official tests."""

RANKS = (1, 2, 4, 8)

STATES = replace(PLAIN, started=True, ended=True)
STATE_CASES: Mapping[str, tuple[Case, Mapping[str, Any]]] = {
    "both": (STATES, {}),
    "started": (replace(STATES, ended=False, documents=3), {}),
    "ended": (replace(STATES, started=False, documents=3), {}),
    "cumulated": (replace(STATES, cumulated=True), {}),
    "sequential": (STATES, {"schedule": "sequential"}),
    "sequential_cached": (STATES, {"schedule": "sequential", "psiv_cache": True}),
    "sequential_general": (replace(STATES, N=32, R=2), {"schedule": "sequential"}),
    "copying": (STATES, {"warp_specialize": True}),
    "copying_sequential_wide": (replace(STATES, N=128), {"warp_specialize": True, "schedule": "sequential"}),
    "in_turn": (STATES, {"heads_in_turn": 4}),
    "in_turn_sequential_wide": (replace(STATES, N=128), {"heads_in_turn": 2, "schedule": "sequential"}),
    "halved": (replace(STATES, P=128, R=1), {"chunk_size": 64}),
    "per_rank_one_token": (replace(STATES, S=1, without=("phi",)), {}),
}
"""States in and out: problem and switches."""

SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "tma_off": {"tma": False},
    "warp_specialize": {"warp_specialize": True},
    "heads_in_turn_2": {"heads_in_turn": 2},
    "heads_in_turn_4": {"heads_in_turn": 4, "superchunk": 64},
    "heads_in_turn_4_tma_off": {"heads_in_turn": 4, "tma": False},
    "heads_in_turn_4_synchronous": {"heads_in_turn": 4, "pipeline_stages": 0},
    "heads_in_turn_4_copying": {"heads_in_turn": 4, "warp_specialize": True},
    "aggressive_smem_merge": {"aggressive_smem_merge": True},
    "layout_3d": {"layout_2d": False},
    "layout_3d_tma_off": {"layout_2d": False, "tma": False},
    "psiv_cache": {"psiv_cache": True},
    "psiv_cache_synchronous": {"psiv_cache": True, "pipeline_stages": 0},
    "exact_math": {"fast_math": False},
    "sequential": {"schedule": "sequential"},
    "sequential_cached": {"schedule": "sequential", "psiv_cache": True},
    "chunk_8": {"chunk_size": 8},
    "chunk_32": {"chunk_size": 32},
    "superchunk_64": {"superchunk": 64},
    "superchunk_512": {"superchunk": 512},
    "synchronous": {"pipeline_stages": 0},
    "double_buffered": {"pipeline_stages": 2},
}
"""Variants that are allowed for `switched`."""

SCHEDULE_ONLY = tuple(
    name
    for name, switches in SWITCHES.items()
    if all(GATES[switch].claim is Claim.SCHEDULE_ONLY for switch in switches)
)
"""Those of SWITCHES that claim to change no bit of the forward pass."""

MERGED = {
    "rank_2": (replace(PLAIN, R=2, documents=2), {"chunk_size": 32}),
    "rank_2_layout_3d": (replace(PLAIN, R=2, documents=2), {"chunk_size": 32, "layout_2d": False}),
    "narrow_state_wide_head": (replace(PLAIN, N=16, P=128, R=2, documents=2), {"chunk_size": 16}),
    "narrow_state_rank_8": (replace(PLAIN, N=16, R=8, documents=2), {"chunk_size": 8}),
    "cumulated_documents": (replace(PLAIN, cumulated=True, documents=4), {}),
    "one_chunk": (CASES["two_tokens_wide"], {}),
    "psiv_cache": (replace(PLAIN, documents=2), {"psiv_cache": True}),
}
"""Problems and switches beside `aggressive_smem_merge`."""

WIDE = (
    *("tma_off", "aggressive_smem_merge", "layout_3d", "psiv_cache_synchronous", "synchronous", "warp_specialize"),
    *("heads_in_turn_4", "heads_in_turn_4_tma_off", "heads_in_turn_4_copying"),
)
"""Those of SWITCHES that `switched_wide` tries with two warp groups."""


HALVED = ((16, 128, 8, 8), (64, 128, 1, 64), (256, 128, 4, 8), (256, 128, 1, 32))
"""(N, P, R, chunk_size) whose heads are halved."""


def scan_problem(case: Case, variant: Variant | None = None) -> ScanProblem:
    """Return what decides which kernels a case needs, in the form that the fuzz compiles."""
    given, default = variant or Variant(), Variant()
    switches = {f.name: getattr(given, f.name) for f in fields(Variant)}
    same = ScanProblem.model_fields.keys() & {field.name for field in fields(Case)}
    return ScanProblem(
        **{name: getattr(case, name) for name in same},
        full_rotary=case.rope == 1,
        switches={name: value for name, value in switches.items() if value != getattr(default, name)},
        wanted=None if case.gradients else (),
    )


def each(problems: Mapping[str, Problem]) -> list[Any]:
    """Return (case, variant) of every test of these problems, marked as what it launches."""
    return [
        pytest.param(case, variant, id=name, marks=pytest.mark.scans(scan_problem(case, variant)))
        for name, (case, variant) in problems.items()
    ]


def official(state: int, width: int, rank: int, chunk: int) -> tuple[Case, Variant]:
    """Return one shape of the official tests."""
    return Case(B=2, S=1024, H=4, N=state, P=width, R=rank, cumulated=True), Variant(chunk_size=chunk)


def of_rank(rank: int) -> tuple[Case, Variant]:
    """Return documents with raw angles at this rank."""
    return replace(PLAIN, R=rank, documents=3), Variant(chunk_size=64 // rank)


def switched(name: str) -> tuple[Case, Variant]:
    """Return documents with raw angles and a variant of SWITCHES."""
    return replace(PLAIN, documents=2), Variant(**SWITCHES[name])


def switched_wide(name: str) -> tuple[Case, Variant]:
    """Return documents with raw angles, a state of 128, whose products two warp groups share, and a variant of WIDE."""
    return replace(PLAIN, N=128, documents=2), Variant(**SWITCHES[name])


def merged(name: str) -> tuple[Case, Variant]:
    """Return a problem of MERGED with shared buffers merged."""
    case, switches = MERGED[name]
    return case, Variant(aggressive_smem_merge=True, **switches)


def halved(state: int, width: int, rank: int, chunk: int) -> tuple[Case, Variant]:
    """Return documents with raw angles and a shape of HALVED."""
    return replace(PLAIN, N=state, P=width, R=rank, documents=2), Variant(chunk_size=chunk)


COMPARED: Mapping[str, Mapping[str, Problem]] = {
    "cases": {name: (case, Variant()) for name, case in CASES.items()},
    "official": {f"official-{sizes}": official(*sizes) for sizes in OFFICIAL},
    "ranks": {f"rank-{rank}": of_rank(rank) for rank in RANKS},
    "switches": {name: switched(name) for name in SWITCHES},
    "wide": {f"wide-{name}": switched_wide(name) for name in WIDE},
    "merged": {f"merged-{name}": merged(name) for name in MERGED},
    "halved": {f"halved-{sizes}": halved(*sizes) for sizes in HALVED},
    "states": {f"state-{name}": (case, Variant(**switches)) for name, (case, switches) in STATE_CASES.items()},
}
"""Every comparison with the reference, by what it is about."""


def every() -> Iterator[tuple[str, Case, Variant]]:
    """Yield the name and the problem of every comparison with the reference."""
    for problems in COMPARED.values():
        yield from ((name, *problem) for name, problem in problems.items())
