"""Tokens of people and keys of nodes. A secret is in one answer only: the one that made it."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictFloat

from kernels.backends import NODE_CLASSES
from service.principals import Scope
from service.schemas.public import Public

TOKEN_NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"  # noqa: S105 - the pattern of a name
NODE_NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,119}$"
HELD_NAME = "^([A-Za-z0-9][A-Za-z0-9._-]{0,63}|node/[A-Za-z0-9][A-Za-z0-9._-]{0,119})$"
"""What `ablate tokens list` shows: tokens of people, and keys of nodes."""
REASON = "^[ -~]{1,500}$"
MAX_GRACE_S = 365 * 86_400.0
DAY_S = 86_400.0

HumanScope = Literal[Scope.READ, Scope.SUBMIT, Scope.OPERATE, Scope.ADMIN]
"""A worker has the key of its node instead."""
DeviceMinutes = Annotated[
    StrictFloat | None, Field(ge=0, allow_inf_nan=False, description="Device minutes in all; null for no limit.")
]
NodeClassName = Annotated[str, Field(json_schema_extra={"enum": list(NODE_CLASSES)}, examples=["h200"])]
Why = Annotated[str, Field(pattern=REASON, description="People will read it.", examples=["Ada left"])]


class AccessRequest(Public):
    """A request about tokens; what it does not know is refused, so that no misspelt limit is passed over."""

    model_config = ConfigDict(extra="forbid")


class TokenRequest(AccessRequest):
    """A token that is wanted."""

    name: str = Field(pattern=TOKEN_NAME, examples=["ada"])
    scope: HumanScope = Field(examples=["submit"])
    device_minutes: DeviceMinutes = None


class NodeKeyRequest(AccessRequest):
    """A node that wants a key."""

    name: str = Field(pattern=NODE_NAME, examples=["gpu-7"])
    node_class: NodeClassName | None = Field(default=None, description="The only class that it may have; null for any.")


class RotateRequest(AccessRequest):
    """How a secret is replaced."""

    grace_s: StrictFloat = Field(
        default=DAY_S, ge=0, le=MAX_GRACE_S, description="So long do the secrets before it count."
    )


class RevokeRequest(AccessRequest):
    """What ends, and why."""

    reason: Why


class QuotaRequest(AccessRequest):
    """What the ablations of a token may use in all."""

    device_minutes: DeviceMinutes


class TokenSecret(Public):
    """A fresh secret. It is stored as a digest and cannot be read again."""

    name: str
    node: str | None
    secret: str


class SecretPublic(Public):
    """A secret that counts now."""

    created_at: str
    ends_at: str | None
    """When it stops, after it was replaced."""


class TokenPublic(Public):
    """A token or the key of a node."""

    id: str
    name: str
    scope: Scope
    node: str | None
    """The node that a key belongs to."""
    node_class: str | None
    device_minutes: float | None
    """Device minutes that its ablations may use in all."""
    device_minutes_used: float
    device_minutes_reserved: float
    """What its ablations that are not over may still use, each up to its own limit."""
    secrets: list[SecretPublic]
    created_at: str
    created_by: str
    """`settings`, or who asked for it."""
    revoked_at: str | None
    reason: str | None


class TokenList(Public):
    """Every token, by name."""

    items: list[TokenPublic]


class Identity(Public):
    """Who asks."""

    name: str
    scope: Scope
    node: str | None
    node_class: str | None
    device_minutes: float | None
    device_minutes_used: float
    device_minutes_reserved: float
    """What its ablations that are not over may still use, each up to its own limit."""


class SignInRequest(AccessRequest):
    """A link to sign in with that is wanted."""

    operate: StrictBool = Field(default=False, description="Whether who follows it may also operate, not only read.")


class SignInLink(Public):
    """A link to sign in with. It counts once, and is stored as a digest."""

    path: str = Field(examples=["/sign-in?link=q3..."])
    """Address on this service."""
    scope: Scope
    """What whoever follows it may do."""
    lasts_s: float
    """Seconds until it counts no more."""
