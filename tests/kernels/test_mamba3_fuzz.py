"""The fuzz without a GPU: what must be refused, and some problems interpreted."""

import math
from itertools import islice

import pytest

pytest.importorskip("tilelang")

from tests.kernels.fuzz import compiling, planning, trial
from tests.kernels.fuzz.draws import DrawLimits, sets
from tests.kernels.fuzz.problems import ALLOWED, must_be_refused
from tests.kernels.fuzz_on_cpu import SMALL, answer
from tests.kernels.interpreted_lane import interpreted_lane

SEED = 0
SETS = list(islice(sets(SEED, DrawLimits()), 120))
DRAWN = [problem for problems in SETS for problem in problems]


@pytest.fixture(autouse=True)
def nan_filled_buffers():
    """Replace the folder's fixture: a trial fills the lane's buffers itself, and the reference needs torch.cumsum."""
    return


def test_what_must_be_refused_is_refused():
    nonsense = [problem for problem in DRAWN if must_be_refused(problem) is not None]
    assert len(nonsense) > 100
    accepted = {must_be_refused(p): p.line for p in nonsense if planning.refusal(p) is None}
    assert accepted == {}


def test_refusals_come_before_anything_is_compiled():
    small = (problems for problems in sets(SEED, SMALL))
    refused = [p for problems in islice(small, 150) for p in problems if planning.refusal(p) is not None]
    assert len(refused) > 200
    with interpreted_lane():
        outcomes = [trial.run(problem, device="cpu") for problem in refused]
    assert [outcome for outcome in outcomes if outcome.ending != "refused"] == []


def test_every_shape_has_a_chunk_size_that_the_lane_allows_but_the_largest_states_of_rank_8():
    problems = [problem for problem in compiling.every() if problem.switches.keys() == {"chunk_size"}]
    every = {(p.N, p.P, p.R) for p in problems}
    assert len(every) == math.prod(len(ALLOWED[name]) for name in ("N", "P", "R"))
    allowed = {(p.N, p.P, p.R) for p in problems if planning.refusal(p) is None}
    assert every - allowed == {(256, width, 8) for width in ALLOWED["P"]}


def interpreted_cost(problem):
    """Return about how many numbers of tiles the interpreted kernels make."""
    shape = planning.sizes(problem)
    return shape.walks * shape.chunks * shape.H * shape.M * max(shape.N, shape.P)


SMALL_ONES = [problems[number % len(problems)] for number, problems in enumerate(islice(sets(SEED, SMALL), 60))]
INTERPRETED = sorted((p for p in SMALL_ONES if planning.refusal(p) is None), key=interpreted_cost)[:6]


@pytest.mark.slow
@pytest.mark.parametrize("problem", INTERPRETED, ids=lambda p: p.line)
def test_problem_is_right_in_the_interpreter(problem):
    outcome = answer(problem)
    assert outcome.ending == "right", outcome.why
