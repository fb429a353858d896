"""One event of an ablation on the wire."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from service.lifecycle import EventKind
from service.schemas.public import Public


class Event(Public):
    """One event of an ablation, as a stream carries it."""

    model_config = ConfigDict(populate_by_name=True)

    seq: int = 0
    at: str = ""
    kind: Annotated[EventKind | str, Field(union_mode="left_to_right")]
    """A name that is no EventKind comes from a newer service."""
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
