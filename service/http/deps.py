"""What routes depend on: the store, who asks, the submitted body, ids. Cheap checks stay on the event loop."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Path, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic_core import from_json
from starlette.convertors import Convertor, register_url_convertor

from experiments.design.load import CONTENT_TYPES
from experiments.errors import SpecProblem
from experiments.ids import id_pattern
from service.errors import Forbidden, Invalid, Unauthorized, UnsupportedMediaType
from service.http.authentication import Authenticator
from service.http.call_limits import CallLimits
from service.http.outlook import Outlook
from service.http.patient_json import PatientRequest
from service.http.rate_limit import RateLimiter
from service.principals import Principal, Scope
from service.queue.wake_ups import WakePublisher
from service.schemas.submissions import SpecBody
from service.settings import ServiceSettings
from service.store.session import Store

_bearer = HTTPBearer(auto_error=False, description="A token of scope read, submit, operate or admin, or a node's key.")


@dataclass(frozen=True, kw_only=True)
class Services:
    """What one process of the API holds."""

    settings: ServiceSettings
    store: Store
    authenticator: Authenticator
    limiter: RateLimiter
    wakes: WakePublisher
    in_flight: set[tuple[str, str]]
    """Idempotency keys that are being answered, as (token id, key)."""
    large_bodies: CapacityLimiter
    """Lets one large body be parsed at a time."""
    call_limits: CallLimits
    outlook: Outlook


async def _services(request: Request) -> Services:  # a plain function would cost a trip to another thread
    return _services_of(request)


def _services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def requires(scope: Scope | None) -> Callable[..., Awaitable[Principal]]:
    """Return the dependency that lets tokens with `scope` pass (None: any) and counts them against their rate."""

    async def check(
        request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
    ) -> Principal:
        services = _services_of(request)
        if credentials is None:
            raise Unauthorized
        secret = credentials.credentials
        principal = services.authenticator.cached(secret)
        if principal is None:
            principal = await to_thread.run_sync(services.authenticator.lookup, secret)
        if scope is not None and not principal.scope.includes(scope):
            raise Forbidden(f"this needs a token with scope '{scope}'; this one has '{principal.scope}'")
        services.limiter.spend(principal.token_id)
        return principal

    return check


ServicesDep = Annotated[Services, Depends(_services)]
Reader = Annotated[Principal, Depends(requires(Scope.READ))]
Submitter = Annotated[Principal, Depends(requires(Scope.SUBMIT))]
Operator = Annotated[Principal, Depends(requires(Scope.OPERATE))]
Admin = Annotated[Principal, Depends(requires(Scope.ADMIN))]
Worker = Annotated[Principal, Depends(requires(Scope.WORKER))]
Anyone = Annotated[Principal, Depends(requires(None))]


class _Name(Convertor[str]):
    """A name before a verb; a slash is part of it: `node/x` is the key of node `x`."""

    regex = ".+"

    def convert(self, value: str) -> str:
        """Take it as it is."""
        return value

    def to_string(self, value: str) -> str:
        """Write it as it is."""
        return value


class _Word(_Name):
    """A part of a path without the sign that a verb begins with: `/x:cancel` is not the thing named `x:cancel`."""

    regex = "[^/:]+"


register_url_convertor("name", _Name())
register_url_convertor("word", _Word())

AblationId = Annotated[str, Path(pattern=id_pattern("abl"), examples=["abl_01KAHZ3V5T8QW2R4Y6M9N0P1S3"])]
TrialId = Annotated[str, Path(pattern=id_pattern("trl"), examples=["trl_01KAHZ3V5T8QW2R4Y6M9N0P1S4"])]
AttemptId = Annotated[str, Path(pattern=id_pattern("att"), examples=["att_01KAHZ3V5T8QW2R4Y6M9N0P1S5"])]


_DOUBTFUL = (rb"\ud", rb"\uD", b"NaN", b"Infinity")


def media_type(request: Request) -> str:
    """Return the request's content type without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def json_only(request: Request) -> None:
    """Refuse a body that is not JSON, or holds what UTF-8 and a receipt cannot: lone surrogates, NaN, Infinity."""
    if media_type(request) != "application/json":
        raise UnsupportedMediaType(f"content type {media_type(request)!r} is not supported; allowed: application/json")
    if isinstance(request, PatientRequest) and await request.is_large():
        return  # its parser refused that already
    body = await request.body()
    if any(word in body for word in _DOUBTFUL):
        try:
            from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise Invalid(problems=[SpecProblem(pointer="#", detail=f"the body is not JSON: {error}")]) from error


async def _spec_body(request: Request) -> SpecBody:
    kind = media_type(request)
    if kind not in CONTENT_TYPES:
        raise UnsupportedMediaType(f"content type {kind!r} is not supported; allowed: {', '.join(CONTENT_TYPES)}")
    return SpecBody(content=await request.body(), content_type=kind)


SpecBodyDep = Annotated[SpecBody, Depends(_spec_body)]
