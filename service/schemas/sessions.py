"""Wire types of sessions and their proposals."""

from pydantic import Field

from ablate.experiments.outcomes import AblationState, ProposalOutcome
from ablate.service.schemas.public import Public
from ablate.service.schemas.submissions import AblationAccepted

LEVEL = "Two-sided level of its tests. It is spent whatever the answer is: undecided, broken and cancelled ones too."


class ProposalPublic(Public):
    """One proposal of a session."""

    number: int
    """From 1."""
    ablation_id: str
    name: str
    """Name of its ablation."""
    note: str | None
    """Its author's words about the change; null without any."""
    change: str
    """How its variant differs from the incumbent of its time, as its spec is written: settings, arguments, code."""
    state: AblationState
    level: float = Field(description=LEVEL)
    outcome: ProposalOutcome | None
    """Null while it is measured."""
    answer: str | None
    """The verdict in a few words; null without one."""
    created_at: str


class SessionPublic(Public):
    """A session in its current state."""

    name: str
    state: str = Field(description="open, or closed: takes no more proposals.", examples=["open"])
    metric: str
    """The deciding metric of all its proposals."""
    node_class: str
    opened_by: str
    created_at: str
    closed_at: str | None
    incumbent: int
    """Number of the kept proposal that is the incumbent; 0 for the baseline of the spec that opened the session."""
    proposals: int
    kept: int
    running: str | None
    """Id of the ablation of the proposal that is measured; null without one."""
    next_level: float = Field(description="Two-sided level of the next proposal, unless the running one is kept.")


class SessionList(Public):
    """All sessions, newest first."""

    items: list[SessionPublic]


class SessionPath(SessionPublic):
    """A session with its proposals in order."""

    path: list[ProposalPublic]
    advice: str | None
    """What its proposals lack: A/A blocks, with the commands that measure them, a margin beyond the noise, or an
    evaluation; null if nothing."""
    whole: str | None = Field(
        description="YAML of a spec whose variant is the incumbent, against the first baseline: what all kept "
        "proposals gained together; null without a kept one."
    )
    spec: str = Field(description="YAML of a spec whose baseline is the incumbent. Change its variant to propose.")


class ProposalAccepted(Public):
    """The answer to a proposal."""

    session: str
    number: int
    level: float = Field(description=LEVEL)
    incumbent: int
    """Number of the kept proposal that it is compared with; 0 for the baseline of the spec that opened the session."""
    accepted: AblationAccepted


class ProposalAnswer(Public):
    """A proposal with its session."""

    outcome: ProposalOutcome | None
    """Null while it is measured."""
    proposal: ProposalPublic
    session: SessionPublic
