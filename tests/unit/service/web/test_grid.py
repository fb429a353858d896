"""The grid of arms and blocks, against a reading of its trials by hand, and the part that is shown of a large one."""

import random
from types import SimpleNamespace

import pytest

from ablate.experiments.outcomes import BlockState, Outcome, TrialState
from ablate.service.web import grid
from tests.public_rows import ablation_row

ARMS = ("baseline", "b", "c")


def test_every_state_and_outcome_has_a_sign_of_its_own() -> None:
    states = [state for state in TrialState if state is not TrialState.DONE]
    assert set(grid.STATES) == {*states, *Outcome, BlockState.HELD}
    looks = {(cell.sign, cell.word) for cell in grid.STATES.values()}
    assert len({sign for sign, _ in looks}) == len({word for _, word in looks}) == len(grid.STATES)


@pytest.mark.parametrize("seed", range(20))
def test_cells_say_how_their_trials_stand(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    states = {index: chance.choice(list(BlockState)) for index in range(4, 4 + chance.randint(1, 7))}
    trials = [
        SimpleNamespace(
            arm=arm,
            block_index=index,
            block_state=block_state,
            state=state,
            outcome=chance.choice(list(Outcome)) if state is TrialState.DONE else None,
            runs_now=state is TrialState.RUNNING and chance.random() < 0.5,
        )
        for index, block_state in states.items()
        for arm in ARMS
        for state in [chance.choice(list(TrialState))]
    ]
    made = grid.make_grid(ARMS, chance.sample(trials, len(trials)), 50)
    words = {arm: dict(zip(made.numbers, (cell.word for cell in cells), strict=True)) for arm, cells in made.rows}
    for trial in trials:
        key = trial.outcome or ("held" if trial.state == "queued" and trial.block_state == "held" else trial.state)
        cell = grid._HAS_RUN if key == "running" and not trial.runs_now else grid.STATES[key]
        assert words[trial.arm][trial.block_index + 1] == cell.word
    assert {cell.word for cell in made.legend} == {word for row in words.values() for word in row.values()}


@pytest.mark.parametrize("seed", range(20))
def test_a_large_grid_shows_the_blocks_around_the_first_that_is_not_over(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    planned, width = chance.randint(1, 10_000), chance.randint(1, 300)
    over = chance.randint(0, planned)
    first = grid._first_shown(ablation_row(blocks={"planned": planned, "done": over, "failed": 0}), width)
    shown = range(first, min(planned, first + width))
    assert first >= 0
    assert len(shown) == min(planned, width)
    assert over in shown or over == planned
