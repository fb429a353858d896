"""Problems and events as clients read them; the other answers are the types of `service.schemas`.

They are lenient: a proxy's problem document leaves fields out, a newer service adds some.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ProblemEntry(_Answer):
    """One thing that was wrong with a request."""

    pointer: str = ""
    detail: str
    hint: str | None = None


class Problem(_Answer):
    """An RFC 9457 problem document."""

    type: str = "about:blank"
    title: str
    status: int | None = None
    detail: str | None = None
    instance: str | None = None
    errors: tuple[ProblemEntry, ...] = ()
    request_id: str | None = None


class Event(_Answer):
    """One line of an ablation's history."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    seq: int = 0
    kind: str
    at: str = ""
    subject: str | None = None
    came_from: str | None = Field(default=None, alias="from")
    went_to: str | None = Field(default=None, alias="to")
    actor: str | None = None
    reason: str | None = None
    data: dict[str, Any] | None = None

    @classmethod
    def of(cls, kind: str, sequence: str, values: dict[str, Any]) -> "Event":
        """Read one server-sent event; its name and id fill in what the data leaves out."""
        given = {"kind": kind, **({"seq": int(sequence)} if sequence else {}), **values}
        return cls.model_validate(given)
