import pytest

from service.errors import IllegalMove
from service.lifecycle import (
    ABLATION_MOVES,
    MOVES,
    OVER,
    AblationState,
    AttemptState,
    BlockState,
    TrialState,
    check_move,
)

STATES = {"ablation": AblationState, "block": BlockState, "trial": TrialState, "attempt": AttemptState}


@pytest.mark.parametrize("machine", MOVES)
def test_moves_cover_every_state_and_lead_only_to_known_ones(machine: str) -> None:
    states = set(STATES[machine])
    assert set(MOVES[machine]) == states
    assert all(targets <= states for targets in MOVES[machine].values())


@pytest.mark.parametrize("machine", MOVES)
def test_moves_reach_an_end_from_every_state(machine: str) -> None:
    moves = MOVES[machine]
    ends = {state for state, targets in moves.items() if not targets}
    for state in moves:
        reached = {state}
        while more := {target for known in reached for target in moves[known]} - reached:
            reached |= more
        assert reached & ends


def test_over_is_exactly_the_final_ablation_states() -> None:
    assert {state for state, targets in ABLATION_MOVES.items() if not targets} == OVER


@pytest.mark.parametrize("machine", MOVES)
def test_check_move_allows_what_the_table_says_and_nothing_else(machine: str) -> None:
    for old in STATES[machine]:
        for new in STATES[machine]:
            if new in MOVES[machine][old]:
                check_move(machine, old, new)
            else:
                with pytest.raises(IllegalMove, match=f"{machine} cannot go from"):
                    check_move(machine, old, new)


def test_check_move_names_what_is_allowed() -> None:
    with pytest.raises(IllegalMove, match="allowed: cancelling, running"):
        check_move("ablation", "queued", "completed")
    with pytest.raises(IllegalMove, match="this state is final"):
        check_move("block", "done", "queued")
