"""The grid of arms and blocks, against a reading of its trials by hand, and the part that is shown of a large one."""

import random

import pytest

from experiments.outcomes import BlockState, Outcome, TrialState
from service.schemas.ablations import BlockPublic, TrialPublic
from service.web import grid
from tests.public_rows import ablation_row, trial_row

ARMS = ("baseline", "b", "c")


def block(index: int, state: BlockState) -> BlockPublic:
    values = {"id": f"blk_{index}", "index": index, "seed": 1, "order": list(ARMS), "state": state, "attempt_no": 1}
    return BlockPublic.model_validate(
        {**values, "node_id": None, "started_at": None, "finished_at": None, "message": None}
    )


def trial(arm: str, index: int, state: TrialState, outcome: Outcome | None) -> TrialPublic:
    return trial_row(arm=arm, block_index=index, state=state, outcome=outcome)


def test_every_state_and_outcome_has_a_sign_of_its_own() -> None:
    states = [state for state in TrialState if state is not TrialState.DONE]
    assert set(grid.STATES) == {*states, *Outcome, BlockState.HELD}
    looks = {(cell.sign, cell.word) for cell in grid.STATES.values()}
    assert len({sign for sign, _ in looks}) == len({word for _, word in looks}) == len(grid.STATES)


@pytest.mark.parametrize("seed", range(20))
def test_cells_say_how_their_trials_stand(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    blocks = [block(index, chance.choice(list(BlockState))) for index in range(4, 4 + chance.randint(1, 7))]
    drawn = [
        (arm, one.index, state, chance.choice(list(Outcome)) if state is TrialState.DONE else None)
        for one in blocks
        for arm in ARMS
        for state in [chance.choice(list(TrialState))]
    ]
    made = grid.make_grid(ARMS, blocks, [trial(*values) for values in chance.sample(drawn, len(drawn))], 50)
    held = {one.index for one in blocks if one.state == "held"}
    words = {arm: dict(zip(made.numbers, (cell.word for cell in cells), strict=True)) for arm, cells in made.rows}
    for arm, index, state, outcome in drawn:
        key = outcome or ("held" if state == "queued" and index in held else state)
        assert words[arm][index + 1] == grid.STATES[key].word
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
