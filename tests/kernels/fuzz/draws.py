"""Random problems over every axis, in sets that share compiled kernels. A seed and a number fix a set.

A compiled kernel depends on sizes, on which tensors there are and on the switches, and compiling takes a hundred times
longer than running. So these are drawn once per set. Drawn for every problem: batch and length, which are known when
kernels are launched, values, documents, layouts and what is asked for. About half of the sets draw something that the
lane refuses: that is part of the test, and costs nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import count
from random import Random
from typing import Any, get_args

from ablate.kernels.mamba3_mimo.cuda.host.lengths import choose_walk, walk_length
from ablate.kernels.mamba3_mimo.cuda.shape import Variant
from ablate.kernels.mamba3_mimo.inputs import DIFFERENTIABLE
from ablate.kernels.scan_switches import HEADS_IN_TURN, PIPELINE_STAGES, SCHEDULES, ScanSwitches
from tests.kernels.fuzz.problems import ALLOWED, Cuts, Decay, Layout, ScanProblem

HEADS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 33)
SWITCHES = {field.name: field.default for field in fields(ScanSwitches) if field.name != "lane"}
"""Switch of the lane -> its default."""
OF_A_PROBLEM = ("chunk_size", "heads_in_turn")
"""Switches that are drawn separately: with the sizes, or per problem because no kernel depends on them."""
CHUNK_ROWS = (32, 64, 128)
"""Usual rows (time, rank) of a chunk."""
SUPERCHUNKS = (64, 128, 256, 512, 1024)
SIDEWAYS = 0.3
"""Share of the sets with the lifted form of the backward walk, if their stages allow it. By chance it is 1 in 50."""
LIFTED = ((64, 4), (64, 4), (64, 8), (128, 2), (128, 4))
"""(N, R) with the lifted form, at P 64 and 64 rows in a chunk."""
OTHER_WALKS = ("psiv_cache", "aggressive_smem_merge")
"""Switches with another form."""


@dataclass(frozen=True, kw_only=True)
class DrawLimits:
    """Limits of the problems' sizes."""

    length: int = 4097
    """Most tokens of a row."""
    elements: int = 2**23
    """Most numbers of a float64 tensor of the reference, if one row with one head does not exceed it."""
    chunks: int = 2**20
    """Most chunks of all rows and heads, if one row with one head does not exceed it."""
    share: int = 32
    """Problems of a set: many if kernels are compiled, else few."""


def sets(seed: int, limits: DrawLimits) -> Iterator[tuple[ScanProblem, ...]]:
    """Yield sets of problems without end. The first problem of a set is never deliberate nonsense."""
    for number in count():
        yield one_set(seed, number, limits)


def one_set(seed: int, number: int, limits: DrawLimits) -> tuple[ScanProblem, ...]:
    """Return set `number`."""
    rnd = Random(f"{seed}/{number}")  # noqa: S311  (a test's choice, no secret)
    shared = _shared(rnd, limits)
    return tuple(_own(rnd, shared, limits, nonsense=i > 0 and rnd.random() < 0.08) for i in range(limits.share))


def _shared(rnd: Random, limits: DrawLimits) -> ScanProblem:
    """Draw the axes that determine the kernels. Batch and length determine the length of the walks."""
    N = rnd.choice((16, 32, 64, 64, 128, 128, 256))
    P, R = rnd.choice(ALLOWED["P"]), rnd.choice(ALLOWED["R"])
    chunks = [rows // R for rows in CHUNK_ROWS if rows // R in ALLOWED["chunk_size"]]
    chunk = rnd.choice(chunks if rnd.random() < 0.95 else ALLOWED["chunk_size"])
    switches = {name: value for name, value in _switches(rnd, chunk).items() if value != SWITCHES[name]}
    without = [name for name in ("z", "phi") if rnd.random() < 0.15]
    if switches.get("warp_specialize") and rnd.random() < 0.8:  # otherwise nearly every draw is refused
        (N, R), P = rnd.choice(LIFTED), 64
        switches = {"warp_specialize": True, "chunk_size": 64 // R, "superchunk": rnd.choice(SUPERCHUNKS)}
        switches = {name: value for name, value in switches.items() if value != SWITCHES[name]}
    elif rnd.random() < SIDEWAYS:
        (N, R), P = rnd.choice(LIFTED), 64
        switches = {name: value for name, value in switches.items() if name not in OTHER_WALKS} | {
            "chunk_size": 64 // R
        }
        switches = {name: value for name, value in switches.items() if value != SWITCHES[name]}
    shape = ScanProblem(N=N, P=P, R=R, H=1, switches=switches)
    S = _length(rnd, _units(shape), limits.length)
    H, G = _heads(rnd, _rows(shape, S, limits))
    return ScanProblem(
        B=_batch(rnd, shape.model_copy(update={"H": H}), S, limits), S=S, H=H, G=G, N=N, P=P, R=R,
        full_rotary=rnd.random() < 0.3, cumulated=(cumulated := rnd.random() < 0.25),
        shared_angles=not cumulated and rnd.random() < 0.4,
        without=tuple(name for missing in without for name in ((missing, "zeta") if missing == "z" else (missing,))),
        switches=switches, started=rnd.random() < 0.3,
    )  # fmt: skip


def _heads(rnd: Random, most: int) -> tuple[int, int]:
    """Draw H and G, often so that a block may take four heads in turn, which few draws allow."""
    drawn = [(H, G) for H in HEADS if most >= H for G in range(1, H + 1) if H % G == 0]
    in_turn = [(H, G) for H, G in drawn if H // G % max(HEADS_IN_TURN) == 0]
    H = rnd.choice([heads for heads in HEADS if heads <= most])
    return rnd.choice(in_turn if in_turn and rnd.random() < 0.4 else [pair for pair in drawn if pair[0] == H])


def _rows(p: ScanProblem, tokens: int, limits: DrawLimits) -> int:
    """Return the most rows of `tokens` tokens over all heads, at least one."""
    elements, chunks = tokens * p.R * max(p.N, p.P), -(-tokens // _chunk(p))
    return max(1, min(limits.elements // elements, limits.chunks // chunks))


def _batch(rnd: Random, p: ScanProblem, tokens: int, limits: DrawLimits) -> int:
    return rnd.choice([batch for batch in (1, 2, 3, 5) if batch <= max(1, _rows(p, tokens, limits) // p.H)])


def _chunk(p: ScanProblem) -> int:
    return int(p.switches.get("chunk_size", ScanSwitches.chunk_size))


def _units(p: ScanProblem) -> tuple[int, ...]:
    """Return the tokens of a row's units: chunks, super-chunks, blocks of the sums over heads."""
    return _chunk(p), int(p.switches.get("superchunk") or 256), 8192 // p.N


def _switches(rnd: Random, chunk: int) -> dict[str, Any]:
    """Draw every switch; a third of the time only the chunk size."""
    drawn = SWITCHES | {"chunk_size": chunk}
    if rnd.random() < 1 / 3:
        return drawn
    choices: dict[str, tuple[Any, ...]] = {
        "schedule": SCHEDULES, "pipeline_stages": PIPELINE_STAGES,
        "superchunk": tuple(size for size in (chunk, 4 * chunk, *SUPERCHUNKS) if size % chunk == 0),
    }  # fmt: skip
    for name, default in SWITCHES.items():
        likely = 0.4 if name in choices else 0.2
        if name not in OF_A_PROBLEM and rnd.random() < likely:
            drawn[name] = (not default) if isinstance(default, bool) else rnd.choice(choices[name])
    return drawn


def _length(rnd: Random, units: tuple[int, ...], most: int) -> int:
    """Draw S: a few tokens, or at an edge of a chunk, super-chunk, block or vector, or anywhere, or the most."""
    kind = rnd.random()
    if kind > 0.97:
        return most
    if kind < 0.2 or most < 8:
        return min(rnd.randint(1, 20), most)
    if kind < 0.4:
        return max(1, int(most ** rnd.random()))
    unit = rnd.choice([unit for unit in (8, 64, 256, 1024, *units) if unit <= most])
    times = max(1, int((most // unit) ** rnd.random()))
    return max(1, min(unit * times + rnd.choice((-1, 0, 0, 1)), most))


def _own(rnd: Random, shared: ScanProblem, limits: DrawLimits, *, nonsense: bool) -> ScanProblem:
    """Draw the axes that do not affect compiled kernels."""
    without = (*shared.without, "D") if rnd.random() < 0.15 else shared.without
    own: dict[str, Any] = _rows_and_length(rnd, shared, limits) | {
        "decay": rnd.choice(get_args(Decay)), "seed": rnd.randrange(10**6), "without": without,
        "wanted": _wanted(rnd, without, shared), "layouts": _layouts(rnd, without),
        "other_stream": rnd.random() < 0.2, "other_device": rnd.random() < 0.2,
        "ended": rnd.random() < 0.3,
    }  # fmt: skip
    own["switches"] |= _in_turn(rnd, shared)
    if rnd.random() < 0.65:
        own |= {"documents": min(int(64 ** rnd.random()) + 1, 64), "cuts": rnd.choice(get_args(Cuts))}
    if nonsense:
        own |= _nonsense(rnd, shared)
    return shared.model_copy(update=own)


def _rows_and_length(rnd: Random, shared: ScanProblem, limits: DrawLimits) -> dict[str, Any]:
    """Draw B and S. If they would get walks of another length, request the walks of the set."""
    walks = choose_walk(Variant(**shared.switches), **_sizes(shared))  # type: ignore[arg-type]
    if walks.schedule == "sequential":
        S = _bucketed(rnd, walks, shared.S, limits.length)
    else:
        S = _length(rnd, (*_units(shared), walks.superchunk), _longest(shared, limits))
    own = shared.model_copy(update={"S": S, "B": _batch(rnd, shared, S, limits)})
    switches = shared.switches
    if choose_walk(Variant(**switches), **_sizes(own)) != walks:  # type: ignore[arg-type]
        switches = switches | {name: getattr(walks, name) for name in ("schedule", "superchunk")}
        switches = {name: value for name, value in switches.items() if value != SWITCHES[name]}
    return {"B": own.B, "S": S, "switches": switches}


def _sizes(p: ScanProblem) -> dict[str, int]:
    return {"rows": p.B * p.H, "tokens": p.S, "state": p.N * p.P}


def _longest(p: ScanProblem, limits: DrawLimits) -> int:
    """Return the most tokens of a row with the heads of the set, at least the set's own."""
    chunk = _chunk(p)
    fits = min(limits.elements // (p.H * p.R * max(p.N, p.P)), limits.chunks // p.H * chunk, limits.length)
    return max(fits, p.S)


def _bucketed(rnd: Random, walks: Variant, tokens: int, longest: int) -> int:
    """Draw a length for which a walk over a row is as long as for `tokens` tokens, often one of the edges."""
    most = min(walk_length(walks, tokens), longest)
    least = next(
        size for size in range(tokens, 0, -1) if size == 1 or walk_length(walks, size - 1) < walk_length(walks, tokens)
    )
    return rnd.choice((least, most, max(least, most - 1), rnd.randint(least, most), tokens))


def _in_turn(rnd: Random, shared: ScanProblem) -> dict[str, int]:
    """Draw the heads in turn, rarely a number that the sizes or the walk do not allow."""
    lifted = (shared.N, shared.R) in LIFTED and shared.P == 64 and not set(OTHER_WALKS) & set(shared.switches)
    fits = [n for n in HEADS_IN_TURN if n > 1 and lifted and shared.H // shared.G % n == 0]
    drawn = rnd.choice((*fits, *fits, 0, 1)) if rnd.random() < 0.97 else rnd.choice(HEADS_IN_TURN)
    return {"heads_in_turn": drawn} if drawn != SWITCHES["heads_in_turn"] else {}


def _wanted(rnd: Random, without: tuple[str, ...], shared: ScanProblem) -> tuple[str, ...] | None:
    kind = rnd.random()
    if kind < 0.7:
        return None
    if kind < 0.8:
        return ()
    absent = without if shared.started else (*without, "entering")
    given = [name for name in DIFFERENTIABLE if name not in absent]
    return tuple(sorted(rnd.sample(given, rnd.randint(1, len(given) - 1))))


def _layouts(rnd: Random, without: tuple[str, ...]) -> dict[str, Layout]:
    if rnd.random() < 0.5:
        return {}
    kinds = get_args(Layout)[1:-1]
    names = [name for name in (*DIFFERENTIABLE, "segment_ids", "grad_out") if name not in without]
    drawn = {name: rnd.choice(kinds) for name in names if rnd.random() < 0.4}
    return drawn | ({"grad_out": "expanded"} if rnd.random() < 0.1 else {})


def _nonsense(rnd: Random, shared: ScanProblem) -> dict[str, Any]:
    """Draw one thing that must be refused."""
    wrong: dict[str, Any] = rnd.choice([
        {"dtype": "float32"}, {"dtype": "float16"}, {"B": 0}, {"S": 0}, {"N": 48}, {"P": 96}, {"R": 3},
        {"G": 2, "H": 5}, {"without": ("zeta",), "wanted": None}, {"switches": {"pipeline_stages": 3}},
        {"switches": {"chunk_size": 12}}, {"switches": {"superchunk": 100}}, {"switches": {"superchunk": -64}},
        {"switches": {"schedule": "backwards"}},
    ])  # fmt: skip
    if "superchunk" in wrong.get("switches", {}):
        wrong["switches"] = {"schedule": "chunk_parallel"} | wrong["switches"]
    if "switches" in wrong:
        wrong["switches"] = shared.switches | wrong["switches"]
    return wrong
