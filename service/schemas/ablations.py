"""Ablations, their blocks and their trials, as they stand."""

from pydantic import Field

from experiments.documents import Frozen, Whole
from experiments.outcomes import AblationState, BlockState, TrialState
from service.schemas.public import INDEX, Public


class Links(Public):
    """Where to go from an ablation."""

    self: str
    events: str
    verdict: str
    report: str
    cancel: str


class BlockCounts(Public):
    """Blocks of an ablation."""

    planned: int
    done: int
    failed: int


class TrialCounts(Public):
    """Trials of an ablation."""

    planned: int
    done: int


class AblationPublic(Public):
    """An ablation as it stands."""

    id: str
    name: str
    question: str
    state: AblationState
    spec_digest: str
    rule_digest: str
    node_class: str
    created_at: str
    started_at: str | None
    finished_at: str | None
    blocks: BlockCounts
    trials: TrialCounts
    priority: int
    waiting_for: str | None
    """What stands between it and its next block, in words; null while a block runs and when it is over."""
    blocks_ahead: int | None
    """Blocks of its node class that are given out before its next one."""
    starts_in_s: float | None
    """Seconds until its next block starts, at the recent pace; null where nothing of the kind was measured."""
    time_left_s: float | None = None
    """Seconds until its last block ends, with the blocks of others that come before it by now, without held ones; null
    where nothing of the kind was measured, and where it has taken as long as it should."""
    answer: str | None = None
    """The word and the effect of its best variant, for lists, or why no block counted; null before it has a verdict."""
    labels: dict[str, str]
    mlflow_url: str | None
    bundles: list[str] = Field(default=[])
    """Digests of the bundles that it was imported from; empty when it was submitted here."""
    request_id: str | None = None
    """Of the request that submitted it: log lines about it, the workers' too, carry this id."""
    links: Links


class PriorityChange(Frozen):
    """Another place in the queue."""

    priority: Whole = Field(ge=0, le=100, description="Higher runs first.")


class BlockPublic(Public):
    """A block as it stands."""

    id: str
    index: int = Field(description=INDEX)
    seed: int
    order: list[str]
    state: BlockState
    attempt_no: int
    node_id: str | None
    started_at: str | None
    finished_at: str | None
    message: str | None


class Progress(Public):
    """How far a trial is."""

    steps_done: int
    steps_total: int | None
    tokens_per_s: float | None
    loss: float | None


class TrialPublic(Public):
    """A trial as it stands."""

    id: str
    block_id: str
    block_index: int = Field(description=INDEX)
    arm: str
    role: str
    position: int = Field(description="Place in the block's order, from 0.")
    state: TrialState
    runs_now: bool = Field(description="Of the running trials of a block: the one whose process computes now.")
    outcome: str | None
    reason: str | None = Field(default=None, description="Why it is over without a measurement.")
    node: str | None = Field(default=None, description="The node that runs its block, or ran it last.")
    broke: str | None = Field(default=None, description="While its block runs again: why the attempt before broke.")
    progress: Progress | None
    receipt_digest: str | None

    @property
    def had_its_turn(self) -> bool:
        """Whether it ran, or a slice of it, and its block goes on: a block hands in all trials together, at its end."""
        return self.state is TrialState.RUNNING and not self.runs_now
