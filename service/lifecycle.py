"""State machines of ablation, block, trial and attempt: the allowed moves, one table each, and nothing else."""

from enum import StrEnum

from service.errors import IllegalMove


class AblationState(StrEnum):
    """Where an ablation is."""

    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    COMPLETED = "completed"
    FAILED = "failed"


class BlockState(StrEnum):
    """Where a block is."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TrialState(StrEnum):
    """Where a trial is."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class AttemptState(StrEnum):
    """Where one try at a block is."""

    RUNNING = "running"
    DONE = "done"
    BROKEN = "broken"
    RELEASED = "released"
    EXPIRED = "expired"


ABLATION_MOVES: dict[str, frozenset[str]] = {
    AblationState.QUEUED: frozenset({AblationState.RUNNING, AblationState.CANCELLING}),
    AblationState.RUNNING: frozenset({AblationState.CANCELLING, AblationState.COMPLETED, AblationState.FAILED}),
    AblationState.CANCELLING: frozenset({AblationState.CANCELLED}),
    AblationState.CANCELLED: frozenset(),
    AblationState.COMPLETED: frozenset(),
    AblationState.FAILED: frozenset(),
}
BLOCK_MOVES: dict[str, frozenset[str]] = {
    BlockState.QUEUED: frozenset({BlockState.RUNNING, BlockState.CANCELLED}),
    BlockState.RUNNING: frozenset({BlockState.QUEUED, BlockState.DONE, BlockState.FAILED, BlockState.CANCELLED}),
    BlockState.DONE: frozenset(),
    BlockState.FAILED: frozenset(),
    BlockState.CANCELLED: frozenset(),
}
TRIAL_MOVES: dict[str, frozenset[str]] = {
    TrialState.QUEUED: frozenset({TrialState.RUNNING, TrialState.DONE, TrialState.CANCELLED, TrialState.FAILED}),
    TrialState.RUNNING: frozenset({TrialState.QUEUED, TrialState.DONE, TrialState.CANCELLED, TrialState.FAILED}),
    TrialState.DONE: frozenset(),
    TrialState.CANCELLED: frozenset(),
    TrialState.FAILED: frozenset(),
}
ATTEMPT_MOVES: dict[str, frozenset[str]] = {
    AttemptState.RUNNING: frozenset(
        {AttemptState.DONE, AttemptState.BROKEN, AttemptState.RELEASED, AttemptState.EXPIRED}
    ),
    AttemptState.DONE: frozenset(),
    AttemptState.BROKEN: frozenset(),
    AttemptState.RELEASED: frozenset(),
    AttemptState.EXPIRED: frozenset(),
}
MOVES = {"ablation": ABLATION_MOVES, "block": BLOCK_MOVES, "trial": TRIAL_MOVES, "attempt": ATTEMPT_MOVES}

OVER = frozenset({AblationState.CANCELLED, AblationState.COMPLETED, AblationState.FAILED})
"""Ablation states that never change again."""


def check_move(machine: str, old: str, new: str) -> None:
    """Raise IllegalMove unless `machine` may go from `old` to `new`."""
    allowed = MOVES[machine][old]
    if new not in allowed:
        known = ", ".join(sorted(allowed)) or "nothing, this state is final"
        raise IllegalMove(f"{machine} cannot go from {old!r} to {new!r}; allowed: {known}")
