"""State machines of ablation, block, trial and attempt, their events, and the kinds of work after a commit.

docs/block-life.md draws `MOVES` and says where each move happens.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from ablate.experiments.outcomes import AblationState, AttemptState, BlockState, TrialState
from ablate.service.errors import IllegalMove


class EventKind(StrEnum):
    """The kind of an event of an ablation; also its name in a stream."""

    ABLATION_STATE = "ablation.state"
    BLOCK_STATE = "block.state"
    TRIAL_STATE = "trial.state"
    ATTEMPT_STATE = "attempt.state"
    TRIAL_PROGRESS = "trial.progress"
    BLOCK_WAITS = "block.waits"
    """A running block begins or ends to wait on its node, for example for quiet cores."""
    PRIORITY = "ablation.priority"
    VERDICT = "verdict"
    LOG = "log"
    """Text of a trial's log. Sent in streams, never stored."""
    CHANGED = "changed"
    """A change anywhere. Sent in the stream of the first page, never stored."""
    END = "end"
    """The last event of a stream. Never stored."""


class OutboxKind(StrEnum):
    """A kind of work that follows a commit."""

    WAKE = "wake"
    """Wake the workers of a node class, because a block waits."""
    LOOK = "look"
    """Decide whether the held blocks of an ablation run."""
    JUDGE = "judge"
    """Compute the verdict of an ablation."""
    REPORT = "report"
    """Render the report of an ablation."""
    PROJECT = "project"
    """Write an ended ablation into MLflow."""
    ANNOUNCE = "announce"
    """Show a waiting or running ablation in MLflow."""
    HOOK = "hook"
    """Call the webhook, because an ablation ended."""
    NOTIFY = "notify"
    """Send one notice to the owner of an ablation that ended."""


PROJECTIONS = (OutboxKind.PROJECT, OutboxKind.ANNOUNCE)
"""The kinds of work that write to MLflow. Finished ablations come before unfinished ones."""

State = TypeVar("State", AblationState, BlockState, TrialState, AttemptState)
"""The states of one machine, which their type selects."""


def _moves(machine: type[State], moves: Mapping[State, set[State]]) -> dict[StrEnum, frozenset[StrEnum]]:
    """Complete a table: a state without an entry is final."""
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
    _X: _moves(_X, {_X.RUNNING: {_X.DONE, _X.BROKEN, _X.EXPIRED}, _X.EXPIRED: {_X.DONE}}),
}
"""The states that may follow each state, by machine.

An expired attempt becomes done if its late result comes before another attempt claims the block."""

REPORTED = "reported"
"""Reason of the last move of a trial that was measured, and of a block whose trials all were."""

STATE_EVENTS: dict[type[StrEnum], EventKind] = {
    AblationState: EventKind.ABLATION_STATE,
    BlockState: EventKind.BLOCK_STATE,
    TrialState: EventKind.TRIAL_STATE,
    AttemptState: EventKind.ATTEMPT_STATE,
}
"""The kind of event for the moves of each machine."""


def _final(machine: type[State]) -> frozenset[State]:
    return frozenset(state for state in machine if not MOVES[machine][state])


OVER = _final(AblationState)
"""Ablation states that never change again."""
TRIAL_OVER = _final(TrialState)
"""Trial states that never change again."""


def check_move(old: State, new: State) -> None:
    """Raise IllegalMove unless `MOVES` allows the move from `old` to `new`."""
    allowed = MOVES[type(old)][old]
    if new not in allowed:
        machine = STATE_EVENTS[type(old)].partition(".")[0]
        names = ", ".join(sorted(allowed)) or "nothing, this state is final"
        raise IllegalMove(f"{machine} cannot go from {old.value!r} to {new.value!r}; allowed: {names}")
