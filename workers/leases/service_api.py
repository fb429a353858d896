"""The worker's client of the service: register, claim, heartbeat, report."""

import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from tenacity import Retrying, before_sleep_log, retry_if_exception_type, stop_after_delay, wait_exponential_jitter

from ablate.experiments.records.code_archive import PIECE_BYTES
from ablate.experiments.records.identity import BlockReport, ClaimedBlock
from ablate.experiments.records.messages import (
    PROBLEM_TYPES,
    AttemptEnded,
    ClaimRequest,
    Enrolment,
    Heartbeat,
    HeartbeatReply,
    NodeRegistered,
    NodeRegistration,
    ProbeOrder,
)
from ablate.experiments.system.http_clients import HomeStack, home_stack, http_client, reason, redirect_hint
from ablate.experiments.system.logs import current_request_id
from ablate.experiments.system.setting_values import shown
from ablate.workers.environment_variables import stack_id
from ablate.workers.errors import ApiRefused, ApiUnreachable, SettingsError, StaleLease
from ablate.workers.settings import Settings

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 3.0
_TRY_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})

_T = TypeVar("_T")
_Message = TypeVar("_Message", bound=BaseModel)


class ServiceApi:
    """Typed calls.

    Each raises ApiUnreachable (retry), ApiRefused (do not retry) or StaleLease (the attempt is over). Only answers of
    the service itself count: a page, a redirect or an error of a proxy in between is ApiUnreachable.
    """

    def __init__(self, url: str, token: str, *, allow_http: bool = False, stack: HomeStack | None = None) -> None:
        """Use the service at `url`, which is the embedded `stack` if there is one. Raises BadSetting."""
        self.url = url
        self._http = http_client(url, token=token, allow_http=allow_http, stack=stack)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def version(self) -> dict[str, Any]:
        """Return the service's version document; needs no key."""
        document: dict[str, Any] = _json(self._send("GET", "/version"))
        return document

    def enrolment_class(self) -> str:
        """Return the node class of the enrolment token. Raises SettingsError for any other token."""
        identity = _json(self._send("GET", "/v1/identity"))
        if identity.get("scope") != "enrol":
            token = f"the token '{identity.get('name')}' with scope '{identity.get('scope')}'"
            raise SettingsError(
                f"ABLATE_ENROLMENT_TOKEN is {token}, no enrolment token; get one: ablate nodes enrol CLASS"
            )
        return str(identity["node_class"])

    def key_node(self) -> str:
        """Return the name of the node to which the key belongs. Raises SettingsError for any other token."""
        identity = _json(self._send("GET", "/v1/identity"))
        if identity.get("node") is None:
            token = f"the token '{identity.get('name')}' with scope '{identity.get('scope')}'"
            raise SettingsError(f"ABLATE_WORKER_TOKEN is {token}, not the key of a node; get one: ablate nodes add")
        return str(identity["node"])

    def enrol(self, name: str, enrolment: Enrolment) -> None:
        """Offer the key of a new node, with an enrolment token."""
        self._send("POST", f"/v1/nodes/{name}:enrol", enrolment)

    def leave(self, name: str) -> None:
        """End the node with its allocation."""
        self._send("POST", f"/v1/nodes/{name}:leave")

    def register(self, name: str, node: NodeRegistration) -> NodeRegistered:
        """Register this node, or update its registration."""
        return _typed(NodeRegistered, self._send("PUT", f"/v1/nodes/{name}", node))

    def claim(self, request: ClaimRequest) -> ClaimedBlock | ProbeOrder | None:
        """Claim the next block for this node's class, None if no block waits; a stopped node may have to probe."""
        answer = self._send("POST", "/v1/blocks:claim", request)
        if answer.status_code == httpx.codes.NO_CONTENT:
            return None
        if answer.status_code == httpx.codes.ACCEPTED:
            return _typed(ProbeOrder, answer)
        return _typed(ClaimedBlock, answer)

    def heartbeat(self, attempt_id: str, beat: Heartbeat, *, timeout_s: float = CALL_TIMEOUT_S) -> HeartbeatReply:
        """Renew the lease. A hanging call ends after `timeout_s`, so that the next may still be in time."""
        answer = self._send("POST", f"/v1/attempts/{attempt_id}:heartbeat", beat, timeout_s=timeout_s)
        return _typed(HeartbeatReply, answer)

    def code(self, attempt_id: str, digest: str) -> Iterator[bytes]:
        """Yield the bytes of an archive of code that the block of an attempt uses."""
        path = f"/v1/attempts/{attempt_id}/code/{digest}"
        timeout = httpx.Timeout(CALL_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        try:
            with self._http.stream("GET", path, timeout=timeout) as answer:
                if not answer.is_success:
                    answer.read()
                    self._checked(answer)
                yield from answer.iter_bytes(PIECE_BYTES)
        except httpx.HTTPError as error:
            raise ApiUnreachable(f"GET {path} at {shown(self.url)}: {reason(error, self.url)}") from error

    def report(self, attempt_id: str, report: BlockReport) -> None:
        """Report the results of the block, or why it has none."""
        answer = self._send("POST", f"/v1/attempts/{attempt_id}:report", report)
        ended = _typed(AttemptEnded, answer)
        if ended.attempt_id != attempt_id:
            raise ApiUnreachable(f"report of {attempt_id}: the answer is about {ended.attempt_id[:60]!a}")

    def _send(
        self, method: str, path: str, message: BaseModel | None = None, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> httpx.Response:
        body = None if message is None else message.model_dump_json().encode()
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S))
        request_id = current_request_id()
        headers = {"Content-Type": "application/json", **({"X-Request-Id": request_id} if request_id else {})}
        try:
            answer = self._http.request(method, path, content=body, headers=headers, timeout=timeout)
        except httpx.HTTPError as error:
            raise ApiUnreachable(f"{method} {path} at {shown(self.url)}: {reason(error, self.url)}") from error
        return self._checked(answer)

    def _checked(self, answer: httpx.Response) -> httpx.Response:
        """Return a successful answer. Raises the error for any other."""
        if answer.is_success:
            return answer
        method, path = answer.request.method, answer.request.url.path
        detail = _detail(answer) + redirect_hint(answer)
        if not _is_own_problem(answer):
            raise ApiUnreachable(f"{method} {path}: status {answer.status_code}, not from the service: {detail}")
        if answer.status_code == httpx.codes.CONFLICT:
            raise StaleLease(detail)
        if answer.status_code in _TRY_LATER:
            raise ApiUnreachable(f"{method} {path}: status {answer.status_code}: {detail}")
        raise ApiRefused(answer.status_code, detail)


def service_api(settings: Settings, *, token: str | None = None) -> ServiceApi:
    """Return the client of the service that the settings name, by default of the embedded stack.

    It uses `token` instead of the worker key.

    A worker that is a part of an embedded stack sends its key to the API of the same stack only.

    Raises:
        ApiUnreachable: there is no address or no key yet.
        BadSetting: one of them cannot be used.

    """
    stack = None if settings.url else home_stack(settings.home_dir)
    own_id = stack_id()
    if settings.url and own_id is not None:
        stack = HomeStack(stack_id=own_id, api_url=settings.url)
    if not settings.url and stack is None:
        raise ApiUnreachable(
            f"no service yet: ABLATE_URL is not set, and {settings.home_dir / 'stack.json'} does not exist"
        )
    token = token or settings.read_token()
    if token is None:
        raise ApiUnreachable(
            f"no worker key yet: ABLATE_WORKER_TOKEN is not set, and {settings.token_file} is missing or empty; "
            "nor is there an enrolment token (ABLATE_ENROLMENT_TOKEN)"
        )
    url = settings.url if stack is None else stack.api_url
    return ServiceApi(url, token, allow_http=settings.allow_http, stack=stack)


def persistently(call: Callable[[], _T], *, patience_s: float, sleep: Callable[[float], None]) -> _T:
    """Retry `call` with growing pauses while the service is unreachable, then raise its last ApiUnreachable."""
    retrying = Retrying(
        retry=retry_if_exception_type(ApiUnreachable),
        wait=wait_exponential_jitter(initial=0.05, max=2.0, jitter=0.05),
        stop=stop_after_delay(patience_s),
        sleep=sleep,
        before_sleep=before_sleep_log(_log, logging.WARNING),
        reraise=True,
    )
    return retrying(call)


def _is_own_problem(answer: httpx.Response) -> bool:
    try:
        problem = answer.json()
    except ValueError:
        return False
    return isinstance(problem, dict) and str(problem.get("type")).startswith(PROBLEM_TYPES)


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        content = answer.json()
    except ValueError as error:
        raise _foreign(answer) from error
    if not isinstance(content, dict):
        raise _foreign(answer)
    return content


def _typed(model: type[_Message], answer: httpx.Response) -> _Message:
    try:
        return model.model_validate_json(answer.content)
    except ValidationError as error:
        raise _foreign(answer) from error


def _foreign(answer: httpx.Response) -> ApiUnreachable:
    kind = answer.headers.get("Content-Type", "no content type")
    request = f"{answer.request.method} {answer.request.url.path}"
    return ApiUnreachable(f"{request}: status {answer.status_code} with {kind}, which is no answer of the service")


def _detail(answer: httpx.Response) -> str:
    """Return the text of a problem document, or the start of any other answer."""
    try:
        problem = answer.json()
    except ValueError:
        return answer.text[:300] or answer.reason_phrase
    if not isinstance(problem, dict):
        return str(problem)[:300]
    errors = problem.get("errors") or []
    parts = [str(problem.get("detail") or problem.get("title") or "")]
    parts += [f"{e.get('pointer')}: {e.get('detail')}" for e in errors[:5] if isinstance(e, dict)]
    return "; ".join(part for part in parts if part)[:1000]
