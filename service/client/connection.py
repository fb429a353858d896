"""The HTTP connection of the Python client, and its errors."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter

from ablate.experiments.errors import BadSetting
from ablate.experiments.system.http_clients import HomeStack, home_stack, http_client, reason, redirect_hint
from ablate.experiments.system.setting_values import checked_secret, http_address, shown
from ablate.service.client.settings import get_client_settings
from ablate.service.schemas.problems import Problem

PAUSE_S = 0.5
_TIMEOUT = httpx.Timeout(30.0, connect=3.0)
_TRIES = 3
_MOST_PAUSE_S = 5.0
"""Longest pause that a busy service gets."""
_PAGE = 500

_Answer = TypeVar("_Answer", bound=BaseModel)
_Parsed = TypeVar("_Parsed")
"""A model, or a list of models."""


class ClientError(Exception):
    """A call to the service failed."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem_text(problem))
        self.problem = problem


def problem_text(problem: Problem) -> str:
    """Return a problem document as text: its detail, then one line for every problem with its hint."""
    lines = [problem.detail or problem.title]
    for entry in problem.errors:
        hint = f" ({entry.hint})" if entry.hint else ""
        lines.append(f"  {entry.pointer or '#'}: {entry.detail}{hint}")
    return "\n".join(lines)


def named(route: str, name: str) -> str:
    """Return the path of `route` with the quoted `name`."""
    return route.format(name=quote(name, safe=""))


class Refused(ClientError):
    """The service rejected the request with a problem document (4xx)."""


class ServiceFailed(ClientError):
    """The service failed (5xx), or the answer is not one of the service's."""


class Unreachable(ClientError):
    """The service's address did not answer."""


class _Page(BaseModel):
    """A page of a list."""

    items: list[Any]
    next_cursor: str | None = None


class Connection:
    """An HTTP connection pool with a token, which turns every failure into a ClientError."""

    def __init__(self, url: str, token: str | None, stack: HomeStack | None = None) -> None:
        self.url = url
        self._is_own = stack is not None
        allow_http = get_client_settings().allow_http
        self.http = http_client(url, token=token, allow_http=allow_http, stack=stack, timeout=_TIMEOUT)

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request that may be repeated; retry it when the connection breaks, or the service is busy."""
        for left in reversed(range(_TRIES)):
            try:
                answer = self.http.request(method, path, **options)
                if not left or (pause_s := _busy_s(answer)) is None:
                    return checked(answer)
                time.sleep(pause_s)
            except httpx.ConnectError as error:
                raise self.unreachable(error) from error
            except httpx.TransportError as error:
                if not left:
                    raise self.unreachable(error) from error
                time.sleep(PAUSE_S)
        raise AssertionError("the loop ends by return or raise")

    def get(self, path: str, answer: type[_Answer], **options: Any) -> _Answer:
        """Return the JSON answer of a GET."""
        return parsed(answer, self.call("GET", path, **options))

    def post(self, path: str, answer: type[_Answer], body: Mapping[str, Any] | None = None) -> _Answer:
        """Return the JSON answer of a POST that may be repeated."""
        return parsed(answer, self.call("POST", path, json=body))

    def post_once(self, path: str, answer: type[_Answer], body: Mapping[str, Any]) -> _Answer:
        """Return the JSON answer of a POST that is never repeated, because each one creates something."""
        try:
            return parsed(answer, checked(self.http.request("POST", path, json=body)))
        except httpx.TransportError as error:
            raise self.unreachable(error) from error

    def pages(self, path: str, answer: type[_Answer], params: Mapping[str, Any]) -> Iterator[_Answer]:
        """Yield the items of all pages of a list."""
        cursor: str | None = params.get("cursor")
        while True:
            query = {"limit": _PAGE, **params, "cursor": cursor}
            page = parsed(_Page, self.call("GET", path, params={k: v for k, v in query.items() if v is not None}))
            yield from (answer.model_validate(item) for item in page.items)
            cursor = page.next_cursor
            if cursor is None:
                return

    def unreachable(self, error: httpx.TransportError) -> Unreachable:
        """Return the error for an address that does not answer, with a remedy."""
        what = f"no answer from {self.url}: {reason(error, self.url)}"
        return _unreachable(
            f"{what}; {_START}"
            if self._is_own
            else f"{what}; check ABLATE_URL, or unset it and start a stack here with `ablate up`"
        )


def _busy_s(answer: httpx.Response) -> float | None:
    """Return after how many seconds a busy service wants the request again, or None if it does not."""
    after = answer.headers.get("Retry-After", "")
    busy = answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and after.isdecimal()
    return min(float(after), _MOST_PAUSE_S) if busy else None


def connection_to(url: str | None, token: str | None, stack: HomeStack | None = None) -> Connection:
    """Return a connection to `url`, by default to the service of the settings.

    Raises Unreachable if the settings name no service and no stack runs here, and BadSetting.
    """
    settings = get_client_settings()
    address = _address(url) if url else settings.url
    if not address:
        stack = home_stack(settings.home)
        if stack is None:
            raise _unreachable(f"{_nothing_here()}; {_START}")
        address = stack.api_url
    secret = _token(token) if token else settings.token_for(address, is_own=stack is not None)
    return Connection(address, secret, stack)


def names_service() -> bool:
    """Return whether the settings name a service, or a stack was started here. Raises BadSetting."""
    settings = get_client_settings()
    return bool(settings.url) or home_stack(settings.home) is not None


def _address(url: str) -> str:
    try:
        return http_address(url)
    except ValueError as error:
        problem = f"the address of the service {error}"
    raise BadSetting(problem)


def _token(token: str) -> str:
    try:
        return checked_secret(token)
    except ValueError as error:
        problem = f"the token of the client: {error}"
    raise BadSetting(problem)


_START = "start it with `ablate up`, or set ABLATE_URL and ABLATE_TOKEN to reach another service"


def _unreachable(detail: str) -> Unreachable:
    return Unreachable(Problem(title="Service unreachable", detail=detail))


def checked(response: httpx.Response) -> httpx.Response:
    """Return a successful response. Raises Refused or ServiceFailed for any other."""
    if response.is_success:
        return response
    if response.headers.get("Content-Type", "").startswith("application/problem+json"):
        problem = parsed(Problem, response)
    else:
        url = shown(str(response.request.url))
        detail = f"{url} answered {response.status_code} without a problem document{redirect_hint(response)}"
        problem = Problem(
            title=response.reason_phrase or "Unexpected answer", status=response.status_code, detail=detail
        )
    if response.status_code == httpx.codes.UNAUTHORIZED and "Authorization" not in response.request.headers:
        problem = problem.model_copy(update={"detail": _no_token(response.request.url)})
    raise (Refused if response.is_client_error else ServiceFailed)(problem)


def parsed(answer: type[_Parsed], response: httpx.Response) -> _Parsed:
    """Return the answer in a successful response. Raises ServiceFailed if another program answered."""
    try:
        return TypeAdapter(answer).validate_python(response.json())
    except ValueError as error:
        kind = response.headers.get("Content-Type", "no content type")
        detail = f"{shown(str(response.request.url))} answered {response.status_code} with {kind}, which is no answer "
        detail += "of this version of Ablate; check ABLATE_URL and its version"
        problem = Problem(title="Unexpected answer", status=response.status_code, detail=detail)
        raise ServiceFailed(problem) from error


def _no_token(url: httpx.URL) -> str:
    """Explain the missing token; usually the stack was started in another folder."""
    return (
        f"{_nothing_here()}; a service answers at {url.scheme}://{url.netloc.decode()}, but this folder has no token: "
        "run the command where `ablate up` was run, or set ABLATE_HOME or ABLATE_TOKEN"
    )


def _nothing_here() -> str:
    return f"nothing runs in {get_client_settings().home}"
