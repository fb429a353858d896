"""States of ablations, blocks, trials and attempts: the words that are stored, sent and shown."""

from enum import StrEnum


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
    """Where an attempt is."""

    RUNNING = "running"
    DONE = "done"
    BROKEN = "broken"
    RELEASED = "released"
    EXPIRED = "expired"
