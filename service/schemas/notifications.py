"""Wire types of notifications about the end of an owner's ablations."""

from typing import Literal, TypeAlias

from pydantic import Field

from ablate.experiments.documents import Frozen
from ablate.service.schemas.public import Public

NotificationKind: TypeAlias = Literal["webhook", "slack", "email"]


class NotificationRequest(Frozen):
    """A wanted notification."""

    kind: NotificationKind = Field(
        description="webhook: a signed message for programs; slack: a text, as chat services take it; email: a text."
    )
    target: str = Field(
        pattern="^[!-~]{3,500}$",
        description="An https address, or an e-mail address.",
        examples=["https://hooks.slack.com/services/T0/B0/x"],
    )


class NotificationPublic(Public):
    """A notification. Paths of addresses are left out, since they are often secrets."""

    id: str = Field(examples=["ntf_01KAHZ3V5T8QW2R4Y6M9N0P1S8"])
    owner: str = Field(description="Name of the token whose ablations it is about.")
    kind: NotificationKind
    target: str = Field(description="The host, or the e-mail address.")
    created_at: str
    sent: int = Field(description="Messages that were accepted.")
    waiting: int = Field(description="Messages that are tried again; they are given up after a day.")
    problem: str | None = Field(description="Why the newest of these was not accepted.")


class NotificationMade(Public):
    """A new notification."""

    notification: NotificationPublic
    secret: str | None = Field(description="Of a webhook: signs its messages. It cannot be read again.")


class NotificationList(Public):
    """Notifications, newest first."""

    items: list[NotificationPublic]
