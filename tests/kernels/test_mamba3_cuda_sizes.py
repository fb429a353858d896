"""A new batch or length compiles nothing: what kernels are compiled for, and what the sizes of a scan decide."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest

pytest.importorskip("tilelang")

from ablate.kernels import facts
from ablate.kernels.mamba3_mimo.cuda.host import compiled
from ablate.kernels.mamba3_mimo.cuda.host.lengths import LENGTHS, ROWS, choose_walk, walk_length
from ablate.kernels.mamba3_mimo.cuda.host.sizes import plan_of, sizes_of
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
from ablate.kernels.scan_switches import ScanFact
from tests.kernels.problem import Case, make_inputs

SHAPE = ScanShape(B=2, S=512, H=4, G=1, N=64, P=64, R=4, A=16)


@pytest.fixture
def made():
    """Replace the compiler; yields (name, shape, variant) of what it was asked to compile."""
    keys = []

    def compile_one(*key):
        keys.append(key)
        return SimpleNamespace(artifact=key)

    with patch.object(compiled, "_compiled", compile_one), patch.dict(compiled._ready, clear=True):
        compiled.build.cache_clear()
        yield keys
    compiled.build.cache_clear()


def built(case, variant):
    """Return how many kernels both passes of a problem compiled."""
    inputs = make_inputs(case, "cpu")
    with facts.collect() as said:
        for direction in ("forward", "backward"):
            compiled.build(direction, *plan_of(sizes_of(inputs), variant)[:2])
    return said[ScanFact.KERNELS_COMPILED]


def test_another_batch_or_length_compiles_nothing(made):
    variant = Variant(superchunk=64)
    assert built(Case(B=2, S=100, H=2), variant) == len(made) == len(compiled.KERNELS)
    assert [built(Case(B=B, S=S, H=2), variant) for B, S in ((1, 1), (3, 64), (5, 65), (1, 700))] == [0] * 4
    assert len(made) == len(compiled.KERNELS)


def test_another_super_chunk_compiles_only_what_depends_on_it(made):
    built(Case(H=2), Variant(superchunk=64))
    assert built(Case(H=2), Variant(superchunk=128)) == len(compiled.KERNELS) - len(compiled.OF_ANY_SUPER_CHUNKS)
    assert len(made) == len(set(made))


def launched(schedule):
    """Kernels of both passes: those of a scan in pieces do not exist for a sequential one."""
    both = [compiled.needed(direction, SHAPE, Variant(schedule=schedule)) for direction in ("forward", "backward")]
    return [(schedule, name) for name in (*both[0], *both[1])]


@pytest.mark.parametrize(("schedule", "name"), [*launched("chunk_parallel"), *launched("sequential")])
def test_a_program_knows_neither_batch_nor_length(schedule, name):
    variant = Variant(schedule=schedule)
    other = ScanShape(**vars(SHAPE) | {"B": 7, "S": 2048})
    assert compiled.program(name, SHAPE, variant).script() == compiled.program(name, other, variant).script()


@pytest.mark.parametrize(
    ("rows", "tokens", "state", "schedule", "length"),
    [
        (128, 8192, 4096, "chunk_parallel", 1024),
        (16, 65536, 4096, "chunk_parallel", 1024),
        (256, 2048, 8192, "sequential", 2048),
        (256, 1100, 8192, "chunk_parallel", 64),
        (32, 2048, 8192, "chunk_parallel", 256),
        (8, 57, 4096, "sequential", 64),
    ],
)
def test_sizes_decide_what_is_left_open(rows, tokens, state, schedule, length):
    variant = choose_walk(Variant(), rows=rows, tokens=tokens, state=state)
    assert (variant.schedule, walk_length(variant, tokens)) == (schedule, length)


def test_what_is_asked_for_is_obeyed_and_lengths_stay_few():
    for variant in (Variant(superchunk=128), Variant(schedule="sequential")):
        assert choose_walk(variant, rows=256, tokens=2048, state=8192) is variant
    sizes = [(rows, tokens) for rows in (1, 8, 64, 300, 2000) for tokens in range(1, 9000, 37)]
    lengths = {walk_length(choose_walk(Variant(), rows=r, tokens=t, state=4096), t) for r, t in sizes}
    assert lengths <= {*LENGTHS, *ROWS}


def test_a_walk_over_whole_rows_is_padded_by_less_than_64_tokens_or_a_sixteenth():
    for tokens in range(1, 5000, 7):
        length = walk_length(Variant(schedule="sequential"), tokens)
        assert tokens <= length < tokens + max(64, tokens / 16)


def test_problems_beyond_two_to_the_31_have_programs_of_their_own():
    most = SHAPE.most_walks
    assert most * SHAPE.L * SHAPE.R * SHAPE.H * SHAPE.N < 2**31
    assert compiled.program("gradients", SHAPE, Variant()).script().count(f"{most}") > 0
