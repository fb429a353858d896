"""Errors of the service, and the one table that turns them into HTTP answers.

A class's docstring is its default message. Routes and the store raise these; only `service.http.problems` knows HTTP.
"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import ClassVar

from experiments.errors import SpecProblem


class ServiceError(Exception):
    """The service could not do what was asked."""

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
    """Another process may have taken this over: its lease ran out."""


class StackError(ServiceError):
    """The embedded stack could not do what was asked."""


class StackBusy(StackError):
    """Another `ablate up` holds this home."""


class PartFailed(StackError):
    """A part of the stack ended, or did not answer in time, while the stack was starting."""

    def __init__(self, part: str, what: str, log_tail: str) -> None:
        super().__init__(f"{part} {what}; the end of its log:\n{log_tail or '(the log is empty)'}")
        self.part = part


class NotFound(ServiceError):
    """There is nothing with this id."""

    status = HTTPStatus.NOT_FOUND
    slug = "not-found"


class Ambiguous(ServiceError):
    """Several things are called so; write more of the name."""

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
    """Header Idempotency-Key is missing; send a fresh random value with every new submission."""

    status = HTTPStatus.BAD_REQUEST
    slug = "missing-idempotency-key"


class IdempotencyMismatch(ServiceError):
    """This Idempotency-Key was used with another body; send a fresh key for a new submission."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    slug = "idempotency-mismatch"


class IdempotencyInFlight(ServiceError):
    """A request with this Idempotency-Key is still being answered; repeat it in a moment."""

    status = HTTPStatus.CONFLICT
    slug = "idempotency-in-flight"

    def __init__(self) -> None:
        super().__init__(headers={"Retry-After": "1"})


class Invalid(ServiceError):
    """The request is not acceptable; every problem found is listed."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    slug = "invalid-request"


class HeadTooLarge(ServiceError):
    """Request line and headers are larger than allowed."""

    status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    slug = "head-too-large"


class UnsupportedMediaType(ServiceError):
    """The body's content type is not supported."""

    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    slug = "unsupported-media-type"


class TooManyRequests(ServiceError):
    """This token sends more requests than it may; wait as long as Retry-After says."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    slug = "rate-limited"


class StaleToken(ServiceError):
    """This attempt no longer holds its block; nothing was changed."""

    status = HTTPStatus.CONFLICT
    slug = "stale-token"


class AblationOver(ServiceError):
    """The ablation is over and cannot be cancelled."""

    status = HTTPStatus.CONFLICT
    slug = "ablation-over"


class ImportedOtherwise(ServiceError):
    """This ablation is here already, from other bundles or submitted; what was judged is not changed."""

    status = HTTPStatus.CONFLICT
    slug = "imported-otherwise"


class KeyRefused(ServiceError):
    """This key is not trusted for this node."""

    status = HTTPStatus.FORBIDDEN
    slug = "key-refused"


class NotOwner(ServiceError):
    """A token may change only what it submitted itself; operators may change everything."""

    status = HTTPStatus.FORBIDDEN
    slug = "not-owner"


class QuotaUsedUp(ServiceError):
    """The ablations of this token have used its device minutes up, or reserved them."""

    status = HTTPStatus.FORBIDDEN
    slug = "quota-used-up"


class NameTaken(ServiceError):
    """There is something of this name already."""

    status = HTTPStatus.CONFLICT
    slug = "name-taken"


class TokenOfSettings(ServiceError):
    """The secret of this token comes from the service's settings; change it there."""

    status = HTTPStatus.CONFLICT
    slug = "token-of-settings"


class NodeTaken(ServiceError):
    """A living node of this name is registered as something else."""

    status = HTTPStatus.CONFLICT
    slug = "node-taken"


class NodeBusy(ServiceError):
    """This node holds as many blocks as it has devices."""

    status = HTTPStatus.CONFLICT
    slug = "node-busy"


class WebhookRefused(ServiceError):
    """The receiver of a webhook did not take it; it is sent again later."""


class NotYet(ServiceError):
    """This does not exist yet."""

    status = HTTPStatus.CONFLICT
    slug = "not-yet"


class IllegalMove(ServiceError):
    """A state machine was asked for a move that its table does not allow."""

    status = HTTPStatus.CONFLICT
    slug = "illegal-move"


class Unavailable(ServiceError):
    """Something that this answer needs cannot be reached."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    slug = "unavailable"


_TITLES = {413: "Content Too Large", 422: "Unprocessable Content"}
"""RFC 9110 renamed them; the standard library follows only from Python 3.13."""


def title_of(status: int) -> str:
    """Return the name of an HTTP status."""
    return _TITLES.get(status) or HTTPStatus(status).phrase
