"""Answers to workers."""

from experiments.outcomes import BlockState
from service.schemas.public import Public


class AttemptClosed(Public):
    """The answer to a report or a release."""

    attempt_id: str
    block_id: str
    block_state: BlockState
