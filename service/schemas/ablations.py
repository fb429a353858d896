"""Wire types of ablations, their blocks, trials and events."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from ablate.experiments.documents import Frozen, Whole
from ablate.experiments.outcomes import AblationState, BlockState, TrialState
from ablate.service.lifecycle import EventKind
from ablate.service.schemas.public import INDEX, Public


class Event(Public):
    """One event of an ablation, as streams carry it."""

    model_config = ConfigDict(populate_by_name=True)

    seq: int = 0
    at: str = ""
    kind: Annotated[EventKind | str, Field(union_mode="left_to_right")]
    """A value that is not an EventKind comes from a newer service."""
    subject: str | None = Field(default=None, description="Id of the ablation, block, trial or attempt.")
    block_index: int | None = Field(default=None, description=f"Of a block, trial or attempt. {INDEX}")
    arm: str | None = Field(default=None, description="Of a trial, or of an attempt that an arm broke.")
    came_from: str | None = Field(default=None, alias="from")
    went_to: str | None = Field(default=None, alias="to")
    actor: str | None = None
    reason: str | None = None
    data: dict[str, Any] | None = None

    @classmethod
    def of(cls, kind: str, sequence: str, values: dict[str, Any]) -> "Event":
        """Parse one server-sent event; its name and id are defaults for its data."""
        fields = {"kind": kind, **({"seq": int(sequence)} if sequence else {}), **values}
        return cls.model_validate(fields)


class LogPiece(Public):
    """One event of a trial's log, as streams carry it."""

    attempt: int = Field(description="Number of the attempt. With a further attempt the log begins again.")
    text: str


class StreamEnd(Public):
    """The last event of a log's stream."""

    reason: str


class Links(Public):
    """Addresses of an ablation's parts."""

    self: str
    events: str
    verdict: str
    report: str
    cancel: str


class BlockCounts(Public):
    """Numbers of blocks of an ablation."""

    planned: int
    done: int
    failed: int


class TrialCounts(Public):
    """Numbers of trials of an ablation."""

    planned: int
    done: int


class AblationPublic(Public):
    """An ablation in its current state."""

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
    submitted_by: str | None = Field(default=None, description="Name of the token that submitted or imported it.")
    waiting_for: str | None
    """Why its next block does not run yet; null while a block runs and when it is over."""
    blocks_ahead: int | None
    """Blocks of its node class that run before its next one."""
    starts_in_s: float | None
    """Seconds until its next block starts, at the recent pace; null without similar measurements."""
    time_left_s: float | None = None
    """Seconds until its last block ends, including blocks of others that come first, without blocks held for a look.
    Null without similar measurements, and when the expected time is over."""
    answer: str | None = None
    """Word and effect of its best variant, or why no block counted; null before the verdict."""
    labels: dict[str, str]
    mlflow_url: str | None
    bundles: list[str] = Field(default=[])
    """Digests of the imported bundles; empty when it was submitted here."""
    request_id: str | None = None
    """Id of the submitting request; log lines about the ablation carry it, the workers' too."""
    links: Links


class PriorityChange(Frozen):
    """A new priority."""

    priority: Whole = Field(ge=0, le=100, description="Higher runs first.")


class BlockPublic(Public):
    """A block in its current state."""

    id: str
    index: int = Field(description=INDEX)
    seed: int | None
    """Null before the block was claimed: until then nobody can try it."""
    order: list[str]
    state: BlockState
    attempt_no: int
    node_id: str | None
    started_at: str | None
    finished_at: str | None
    message: str | None


class Progress(Public):
    """Progress of a trial."""

    steps_done: int
    steps_total: int | None
    tokens_per_s: float | None
    loss: float | None


class TrialPublic(Public):
    """A trial in its current state."""

    id: str
    block_id: str
    block_index: int = Field(description=INDEX)
    arm: str
    role: str
    position: int = Field(description="Place in the block's order, from 0.")
    state: TrialState
    runs_now: bool = Field(description="Whether its process computes now; a block runs one trial at a time.")
    outcome: str | None
    reason: str | None = Field(default=None, description="Why it ended without a measurement.")
    node: str | None = Field(default=None, description="The node that runs its block or ran it last.")
    broke: str | None = Field(default=None, description="While its block runs again: why the previous attempt broke.")
    progress: Progress | None
    receipt_digest: str | None

    @property
    def had_its_turn(self) -> bool:
        """Whether it, or a slice of it, ran while its block goes on. A block reports all trials at its end."""
        return self.state is TrialState.RUNNING and not self.runs_now
