"""Errors of the service with their HTTP status and problem type.

A class's docstring is its default message. Routes and the store raise these, and `ablate.service.http.problems`
answers them.
"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import ClassVar

from ablate.experiments.errors import SpecProblem


class ServiceError(Exception):
    """The service failed."""

    status: ClassVar[HTTPStatus] = HTTPStatus.INTERNAL_SERVER_ERROR
    slug: ClassVar[str] = "internal"
    """Last part of the problem's type URI."""

    def __init__(
        self,
        message: str | None = None,
        *,
        problems: Sequence[SpecProblem] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message or type(self).__doc__)
        self.problems = tuple(problems)
        self.headers = dict(headers or {})


class ConfigurationError(ServiceError):
    """The settings do not allow a start."""


class LeaseLost(ServiceError):
    """The lease expired; another process may have taken over."""


class StackError(ServiceError):
    """The embedded stack failed."""


class StackBusy(StackError):
    """Another `ablate up` uses this home."""


class FleetError(ServiceError):
    """The cluster cannot run these workers."""


class ForgeError(ServiceError):
    """GitHub or GitLab rejected a request, or this job may not measure the pull request."""

    def __init__(self, message: str, *, answered: int | None = None) -> None:
        super().__init__(message)
        self.answered = answered
        """Status of its answer."""


class ForgeBusy(ForgeError):
    """GitHub or GitLab does not answer now, or wants fewer requests."""

    def __init__(self, message: str, *, pause_s: float) -> None:
        super().__init__(message)
        self.pause_s = pause_s
        """After this time it may answer."""


class PartFailed(StackError):
    """A part of the stack ended or did not answer in time during the start."""

    def __init__(self, part: str, what: str, log_tail: str) -> None:
        super().__init__(f"{part} {what}; the end of its log:\n{log_tail or '(the log is empty)'}")
        self.part = part


class PortTaken(PartFailed):
    """Another process listens on the port that was free for a part."""


class NotFound(ServiceError):
    """Nothing has this id."""

    status = HTTPStatus.NOT_FOUND
    slug = "not-found"


class Ambiguous(ServiceError):
    """Several things match this name; write more of it."""

    status = HTTPStatus.CONFLICT
    slug = "ambiguous"


class Unauthorized(ServiceError):
    """A valid bearer token is needed."""

    status = HTTPStatus.UNAUTHORIZED
    slug = "unauthorized"

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message, headers={"WWW-Authenticate": "Bearer"})


class Forbidden(ServiceError):
    """The token's scope does not allow this."""

    status = HTTPStatus.FORBIDDEN
    slug = "forbidden"


class MissingIdempotencyKey(ServiceError):
    """Header Idempotency-Key is missing; send a new random value with every submission."""

    status = HTTPStatus.BAD_REQUEST
    slug = "missing-idempotency-key"


class IdempotencyMismatch(ServiceError):
    """This Idempotency-Key was used with another body; send a new key for a new submission."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    slug = "idempotency-mismatch"


class IdempotencyInFlight(ServiceError):
    """A request with this Idempotency-Key is in progress; repeat it in a moment."""

    status = HTTPStatus.CONFLICT
    slug = "idempotency-in-flight"

    def __init__(self) -> None:
        super().__init__(headers={"Retry-After": "1"})


class Invalid(ServiceError):
    """The request is invalid; every problem is listed."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    slug = "invalid-request"


class CodeStorageFull(ServiceError):
    """The service stores as much code as it may."""

    status = HTTPStatus.INSUFFICIENT_STORAGE
    slug = "code-storage-full"


class UnsupportedMediaType(ServiceError):
    """The body's content type is not supported."""

    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    slug = "unsupported-media-type"


class TooManyRequests(ServiceError):
    """This token sends too many requests; wait for the seconds in Retry-After."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    slug = "rate-limited"


class StaleToken(ServiceError):
    """This attempt no longer owns its block; nothing was changed."""

    status = HTTPStatus.CONFLICT
    slug = "stale-token"


class AblationOver(ServiceError):
    """The ablation is over and cannot be cancelled."""

    status = HTTPStatus.CONFLICT
    slug = "ablation-over"


class ImportedOtherwise(ServiceError):
    """This ablation exists, submitted or from other bundles; a judged ablation does not change."""

    status = HTTPStatus.CONFLICT
    slug = "imported-otherwise"


class KeyRefused(ServiceError):
    """This key is not trusted for this node."""

    status = HTTPStatus.FORBIDDEN
    slug = "key-refused"


class EnrolmentRefused(ServiceError):
    """This enrolment token does not allow this node."""

    status = HTTPStatus.FORBIDDEN
    slug = "enrolment-refused"


class NotOwner(ServiceError):
    """A token may change only its own ablations; operators may change all."""

    status = HTTPStatus.FORBIDDEN
    slug = "not-owner"


class QuotaUsedUp(ServiceError):
    """The ablations of this token have used or reserved all its device minutes."""

    status = HTTPStatus.FORBIDDEN
    slug = "quota-used-up"


class NameTaken(ServiceError):
    """This name is taken."""

    status = HTTPStatus.CONFLICT
    slug = "name-taken"


class SessionClosed(ServiceError):
    """This session is closed; it takes no proposals."""

    status = HTTPStatus.CONFLICT
    slug = "session-closed"


class SessionBusy(ServiceError):
    """A proposal of this session is being measured; its answer decides the incumbent and the level of the next."""

    status = HTTPStatus.CONFLICT
    slug = "session-busy"


class TokenOfSettings(ServiceError):
    """The secret of this token comes from the service's settings; change it there."""

    status = HTTPStatus.CONFLICT
    slug = "token-of-settings"


class NodeTaken(ServiceError):
    """A live node of this name is registered with another class or key."""

    status = HTTPStatus.CONFLICT
    slug = "node-taken"


class NodeBusy(ServiceError):
    """This node runs as many blocks as it has devices."""

    status = HTTPStatus.CONFLICT
    slug = "node-busy"


class WebhookRefused(ServiceError):
    """The receiver rejected the webhook; the service retries later."""


class NotYet(ServiceError):
    """This does not exist yet."""

    status = HTTPStatus.CONFLICT
    slug = "not-yet"


class IllegalMove(ServiceError):
    """The state machine does not allow this transition."""

    status = HTTPStatus.CONFLICT
    slug = "illegal-move"


class Unavailable(ServiceError):
    """A dependency of this answer cannot be reached."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    slug = "unavailable"


_TITLES = {413: "Content Too Large", 422: "Unprocessable Content"}
"""New names in RFC 9110; the standard library has them only from Python 3.13."""


def title_of(status: int) -> str:
    """Return the name of an HTTP status."""
    return _TITLES.get(status) or HTTPStatus(status).phrase
