"""Wire types of tokens and node keys. A secret appears only in the answer that created it."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictFloat

from ablate.experiments.documents import Whole
from ablate.experiments.ids import NODE_NAME, REASON, TOKEN_NAME
from ablate.experiments.node_classes import GPU_PATTERN, MOST_LETTERS, NODE_CLASSES
from ablate.service.principals import Scope
from ablate.service.schemas.public import Public

MAX_GRACE_S = 365 * 86_400.0
DAY_S = 86_400.0
MAX_LASTS_S = 90 * DAY_S
MAX_USES = 100_000

HumanScope = Literal[Scope.READ, Scope.SUBMIT, Scope.CODE, Scope.OPERATE, Scope.ADMIN]
"""Scopes of people's tokens; a worker has the key of its node."""
DeviceMinutes = Annotated[
    StrictFloat | None, Field(ge=0, allow_inf_nan=False, description="Device minutes in all; null for no limit.")
]
_GPU_NAME = {"type": "string", "pattern": GPU_PATTERN, "maxLength": MOST_LETTERS}
NodeClassName = Annotated[
    str, Field(json_schema_extra={"anyOf": [{"enum": list(NODE_CLASSES)}, _GPU_NAME]}, examples=["h200"])
]
Why = Annotated[str, Field(pattern=REASON, description="People will read it.", examples=["Ada left"])]


class AccessRequest(Public):
    """A request about tokens; unknown fields are errors, so that no misspelt limit is ignored."""

    model_config = ConfigDict(extra="forbid")


class TokenRequest(AccessRequest):
    """A request for a token."""

    name: str = Field(pattern=TOKEN_NAME, examples=["ada"])
    scope: HumanScope = Field(examples=["submit"])
    device_minutes: DeviceMinutes = None


NEW_CLASS: bool = Field(
    default=False, description="Allow a class of which no machine is known, although its name is nearly another's."
)


class NodeKeyRequest(AccessRequest):
    """A request for the key of a node."""

    name: str = Field(pattern=NODE_NAME, examples=["gpu-7"])
    node_class: NodeClassName | None = Field(default=None, description="The only allowed class; null for any.")
    new_class: StrictBool = NEW_CLASS


class EnrolmentRequest(AccessRequest):
    """A request for an enrolment token."""

    node_class: NodeClassName
    new_class: StrictBool = NEW_CLASS
    uses: Whole = Field(default=1, ge=1, le=MAX_USES, description="Nodes that may enrol with it.")
    lasts_s: StrictFloat = Field(default=DAY_S, gt=0, le=MAX_LASTS_S, description="It expires after this long.")


class RotateRequest(AccessRequest):
    """A request to replace a secret."""

    grace_s: StrictFloat = Field(
        default=DAY_S, ge=0, le=MAX_GRACE_S, description="The old secrets stay valid for this long."
    )


class RevokeRequest(AccessRequest):
    """A request to revoke a token or key."""

    reason: Why


class QuotaRequest(AccessRequest):
    """A request to change a quota."""

    device_minutes: DeviceMinutes


class TokenSecret(Public):
    """A new secret. Only its digest is stored, so it cannot be shown again."""

    name: str
    node: str | None
    secret: str


class SecretPublic(Public):
    """A valid secret."""

    created_at: str
    ends_at: str | None
    """End of an enrolment token, and of the grace period after a replacement."""


class TokenPublic(Public):
    """A token, the key of a node, or an enrolment token."""

    id: str
    name: str
    scope: Scope
    node: str | None
    """The node of a key; null for a person's token."""
    node_class: str | None
    device_minutes: float | None
    """Quota of its ablations in total; null for no limit."""
    device_minutes_used: float
    device_minutes_reserved: float
    """Minutes that its unfinished ablations may still use, each up to its own limit."""
    uses_left: int | None
    """Nodes that may still enrol with an enrolment token; null for others."""
    secrets: list[SecretPublic]
    created_at: str
    created_by: str
    """`settings`, or the name of the token that created it."""
    revoked_at: str | None
    reason: str | None


class TokenList(Public):
    """Every token, by name."""

    items: list[TokenPublic]


class Identity(Public):
    """The caller."""

    name: str
    scope: Scope
    node: str | None
    node_class: str | None
    device_minutes: float | None
    device_minutes_used: float
    device_minutes_reserved: float
    """Minutes that its unfinished ablations may still use, each up to its own limit."""


class SignInRequest(AccessRequest):
    """A request for a sign-in link."""

    operate: StrictBool = Field(default=False, description="Whether its user may also operate, not only read.")


class SignInLink(Public):
    """A sign-in link. It works once; only its digest is stored."""

    path: str = Field(examples=["/sign-in?link=q3..."])
    """Address on this service."""
    scope: Scope
    """Scope of its user."""
    lasts_s: float
    """Seconds until it expires."""
