"""Dependencies of the routes: services, the caller, the body and ids, and the threads that a route's calls run in."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Annotated, Any, ClassVar

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Path, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic_core import from_json
from starlette.convertors import Convertor, register_url_convertor

from ablate.experiments.design.load import CONTENT_TYPES
from ablate.experiments.errors import SpecProblem
from ablate.experiments.ids import id_pattern
from ablate.service.errors import Forbidden, Invalid, UnsupportedMediaType
from ablate.service.http.authentication import Authenticator, RateLimiter
from ablate.service.principals import Principal, Scope
from ablate.service.queue.wake_ups import WakePublisher
from ablate.service.schemas.submissions import SpecBody
from ablate.service.settings import ServiceSettings
from ablate.service.store.session import LONG_AT_ONCE, WORKERS_AT_ONCE, Store

_bearer = HTTPBearer(auto_error=False, description="A token of scope read, submit, operate or admin, or a node's key.")


@dataclass(frozen=True, kw_only=True)
class Services:
    """The objects that all requests of one API process share."""

    settings: ServiceSettings
    store: Store
    authenticator: Authenticator
    limiter: RateLimiter
    wakes: WakePublisher
    in_flight: set[tuple[str, str]] = field(default_factory=set)
    """Idempotency keys of submissions in progress, as (token id, key)."""
    worker_threads: CapacityLimiter = field(default_factory=partial(CapacityLimiter, WORKERS_AT_ONCE))
    long_threads: CapacityLimiter = field(default_factory=partial(CapacityLimiter, LONG_AT_ONCE))


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(_services)]


def requires(scope: Scope | None) -> Callable[..., Awaitable[Principal]]:
    """Return the dependency that allows tokens with `scope` (None: any) and enforces their rate limit.

    The middleware has looked the principal up.
    """

    async def check(request: Request, services: ServicesDep, _: Annotated[Any, Depends(_bearer)]) -> Principal:
        principal: Principal = request.state.principal
        if scope is not None and not principal.scope.includes(scope):
            raise Forbidden(f"this needs a token with scope '{scope}'; this one has '{principal.scope}'")
        services.limiter.spend(principal.token_id)
        return principal

    return check


Reader = Annotated[Principal, Depends(requires(Scope.READ))]
Submitter = Annotated[Principal, Depends(requires(Scope.SUBMIT))]
Coder = Annotated[Principal, Depends(requires(Scope.CODE))]
Operator = Annotated[Principal, Depends(requires(Scope.OPERATE))]
Admin = Annotated[Principal, Depends(requires(Scope.ADMIN))]
Worker = Annotated[Principal, Depends(requires(Scope.WORKER))]
Enroller = Annotated[Principal, Depends(requires(Scope.ENROL))]
Anyone = Annotated[Principal, Depends(requires(None))]


class _LimitedRoute(APIRoute):
    """A route whose calls run in a limited number of threads of their own; its function takes `services`."""

    threads: ClassVar[str]
    """The field of Services that limits them."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, _limited(endpoint, self.threads), **options)


class WorkerRoute(_LimitedRoute):
    """A route for workers."""

    threads = "worker_threads"


class LongRoute(_LimitedRoute):
    """A route whose calls may compute for seconds."""

    threads = "long_threads"


def _limited(call: Callable[..., Any], threads: str) -> Callable[..., Awaitable[Any]]:
    @wraps(call)
    async def wait_and_run(**values: Any) -> Any:
        limiter: CapacityLimiter = getattr(values["services"], threads)
        return await to_thread.run_sync(partial(call, **values), limiter=limiter)

    return wait_and_run


class _Name(Convertor[str]):
    """A name before a verb; it may contain a slash: `node/x` is the key of node `x`."""

    regex = ".+"

    def convert(self, value: str) -> str:
        """Return the name unchanged."""
        return value

    def to_string(self, value: str) -> str:
        """Return the name unchanged."""
        return value


class _Word(_Name):
    """A path segment without a colon, which begins a verb: `/x:cancel` does not name the thing `x:cancel`."""

    regex = "[^/:]+"


register_url_convertor("name", _Name())
register_url_convertor("word", _Word())

AblationId = Annotated[str, Path(pattern=id_pattern("abl"), examples=["abl_01KAHZ3V5T8QW2R4Y6M9N0P1S3"])]
TrialId = Annotated[str, Path(pattern=id_pattern("trl"), examples=["trl_01KAHZ3V5T8QW2R4Y6M9N0P1S4"])]
AttemptId = Annotated[str, Path(pattern=id_pattern("att"), examples=["att_01KAHZ3V5T8QW2R4Y6M9N0P1S5"])]


_DOUBTFUL = (rb"\ud", rb"\uD", b"NaN", b"Infinity")


async def body_of_type(request: Request, *types: str) -> bytes:
    """Return the body. Raises UnsupportedMediaType unless its content type is one of `types`."""
    if media_type(request) not in types:
        raise UnsupportedMediaType(
            f"content type {media_type(request)!r} is not supported; allowed: {', '.join(types)}"
        )
    return await request.body()


def media_type(request: Request) -> str:
    """Return the request's content type without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def json_only(request: Request) -> None:
    """Reject a body that is not JSON, or has lone surrogates, NaN or Infinity, which a receipt cannot hold."""
    body = await body_of_type(request, "application/json")
    if any(word in body for word in _DOUBTFUL):
        try:
            from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise Invalid(problems=[SpecProblem(pointer="#", detail=f"the body is not JSON: {error}")]) from error


async def _spec_body(request: Request) -> SpecBody:
    return SpecBody(content=await body_of_type(request, *CONTENT_TYPES), content_type=media_type(request))


SpecBodyDep = Annotated[SpecBody, Depends(_spec_body)]
