from enum import StrEnum

import pytest

from ablate.experiments.outcomes import AblationState, AttemptState, BlockState, TrialState
from ablate.service.errors import IllegalMove
from ablate.service.lifecycle import MOVES, OVER, STATE_EVENTS, TRIAL_OVER, EventKind, check_move

MACHINES = (AblationState, BlockState, TrialState, AttemptState)


@pytest.mark.parametrize("machine", MACHINES)
def test_moves_cover_every_state_and_lead_only_to_known_ones(machine: type[StrEnum]) -> None:
    assert set(MOVES[machine]) == set(machine)
    assert all(target in machine for targets in MOVES[machine].values() for target in targets)
    assert all(type(target) is machine for targets in MOVES[machine].values() for target in targets)


@pytest.mark.parametrize("machine", MACHINES)
def test_moves_reach_an_end_from_every_state(machine: type[StrEnum]) -> None:
    moves = MOVES[machine]
    ends = {state for state, targets in moves.items() if not targets}
    for state in moves:
        reached = {state}
        while more := {target for known in reached for target in moves[known]} - reached:
            reached |= more
        assert reached & ends


def test_over_is_exactly_the_final_states() -> None:
    assert {AblationState.CANCELLED, AblationState.COMPLETED, AblationState.FAILED} == OVER
    assert {TrialState.DONE, TrialState.CANCELLED, TrialState.FAILED} == TRIAL_OVER


def test_every_machine_has_an_event_of_its_own() -> None:
    assert set(STATE_EVENTS) == set(MOVES) == set(MACHINES)
    assert {kind for kind in EventKind if kind.endswith(".state")} == set(STATE_EVENTS.values())


@pytest.mark.parametrize("machine", MACHINES)
def test_check_move_allows_what_the_table_says_and_nothing_else(machine: type[StrEnum]) -> None:
    for old in machine:
        for new in machine:
            if new in MOVES[machine][old]:
                check_move(old, new)
            else:
                with pytest.raises(IllegalMove, match=f"{STATE_EVENTS[machine].partition('.')[0]} cannot go from"):
                    check_move(old, new)


def test_check_move_names_what_is_allowed() -> None:
    with pytest.raises(IllegalMove, match="allowed: cancelling, running"):
        check_move(AblationState.QUEUED, AblationState.COMPLETED)
    with pytest.raises(IllegalMove, match="this state is final"):
        check_move(BlockState.DONE, BlockState.QUEUED)
