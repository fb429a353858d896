"""Wire types of links that show one answer."""

from pydantic import Field

from ablate.experiments.documents import Frozen
from ablate.service.schemas.public import Public

MOST_HOURS = 24 * 366


class ShareRequest(Frozen):
    """A wanted link."""

    hours: float = Field(
        default=168.0, gt=0, le=MOST_HOURS, strict=True, allow_inf_nan=False, description="How long it is valid."
    )


class ShareLinkPublic(Public):
    """A link, without its secret."""

    id: str = Field(examples=["shr_01KAHZ3V5T8QW2R4Y6M9N0P1S7"])
    ablation_id: str
    created_by: str
    created_at: str
    ends_at: str
    revoked_at: str | None
    is_valid: bool = Field(description="False once it has ended, was revoked, or its maker's token was.")
    uses: int = Field(description="How often the page was shown.")
    used_at: str | None = Field(description="When it was shown last.")


class ShareLink(Public):
    """A new link."""

    link: ShareLinkPublic
    path: str = Field(description="Path with the secret, below the service's address. It cannot be read again.")


class ShareLinkList(Public):
    """All links of an ablation, newest first."""

    items: list[ShareLinkPublic]
