"""State machines of ablation, block, trial and attempt, the events that tell of them, and the work that follows."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from experiments.outcomes import AblationState, AttemptState, BlockState, TrialState
from service.errors import IllegalMove


class EventKind(StrEnum):
    """What an event of an ablation tells; also the event's name in a stream."""

    ABLATION_STATE = "ablation.state"
    BLOCK_STATE = "block.state"
    TRIAL_STATE = "trial.state"
    ATTEMPT_STATE = "attempt.state"
    TRIAL_PROGRESS = "trial.progress"
    PRIORITY = "ablation.priority"
    VERDICT = "verdict"
    LOG = "log"
    """Text of a trial's log: only in a stream, never stored."""
    CHANGED = "changed"
    """Something has changed somewhere: only in the stream of the first page, never stored."""
    END = "end"
    """The last event of a stream: nothing more can come. Never stored."""


class OutboxKind(StrEnum):
    """What has to happen after a commit."""

    WAKE = "wake"
    """Tell the workers of a node class that a block waits."""
    LOOK = "look"
    """Look at an ablation whose held blocks may not be needed."""
    JUDGE = "judge"
    REPORT = "report"
    PROJECT = "project"
    """Write an ablation that is over into MLflow."""
    ANNOUNCE = "announce"
    """Show an ablation that waits or runs in MLflow."""
    HOOK = "hook"
    """Tell another service that an ablation is over."""


State = TypeVar("State", AblationState, BlockState, TrialState, AttemptState)
"""The states of one machine: its type says which."""


def _moves(machine: type[State], moves: Mapping[State, set[State]]) -> dict[StrEnum, frozenset[StrEnum]]:
    """Complete a table: states that it does not name are final."""
    return {state: frozenset(moves.get(state, ())) for state in machine}


_A, _B, _T, _X = AblationState, BlockState, TrialState, AttemptState

MOVES: dict[type[StrEnum], Mapping[StrEnum, frozenset[StrEnum]]] = {
    _A: _moves(
        _A,
        {
            _A.QUEUED: {_A.RUNNING, _A.CANCELLING},
            _A.RUNNING: {_A.CANCELLING, _A.COMPLETED, _A.FAILED},
            _A.CANCELLING: {_A.CANCELLED, _A.COMPLETED},
        },
    ),
    _B: _moves(
        _B,
        {
            _B.HELD: {_B.QUEUED, _B.CANCELLED},
            _B.QUEUED: {_B.RUNNING, _B.CANCELLED},
            _B.RUNNING: {_B.QUEUED, _B.DONE, _B.FAILED, _B.CANCELLED},
        },
    ),
    _T: _moves(
        _T,
        {
            _T.QUEUED: {_T.RUNNING, _T.DONE, _T.CANCELLED, _T.FAILED},
            _T.RUNNING: {_T.QUEUED, _T.DONE, _T.CANCELLED, _T.FAILED},
        },
    ),
    _X: _moves(_X, {_X.RUNNING: {_X.DONE, _X.BROKEN, _X.RELEASED, _X.EXPIRED}, _X.EXPIRED: {_X.DONE}}),
}
"""For every machine: the states that may follow a state. An attempt that expired is done when its
late result is taken while nobody else holds its block."""

STATE_EVENTS: dict[type[StrEnum], EventKind] = {
    AblationState: EventKind.ABLATION_STATE,
    BlockState: EventKind.BLOCK_STATE,
    TrialState: EventKind.TRIAL_STATE,
    AttemptState: EventKind.ATTEMPT_STATE,
}
"""The event that tells of a machine's moves."""


def _final(machine: type[State]) -> frozenset[State]:
    return frozenset(state for state in machine if not MOVES[machine][state])


OVER = _final(AblationState)
"""Ablation states that never change again."""
TRIAL_OVER = _final(TrialState)
"""Trial states that never change again."""


def check_move(old: State, new: State) -> None:
    """Raise IllegalMove unless the machine of these states may go from `old` to `new`."""
    allowed = MOVES[type(old)][old]
    if new not in allowed:
        machine = STATE_EVENTS[type(old)].partition(".")[0]
        known = ", ".join(sorted(allowed)) or "nothing, this state is final"
        raise IllegalMove(f"{machine} cannot go from {old.value!r} to {new.value!r}; allowed: {known}")
