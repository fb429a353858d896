"""The worker's client of the service: register, claim, heartbeat, report, release."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel
from tenacity import Retrying, before_sleep_log, retry_if_exception_type, stop_after_delay, wait_exponential_jitter

from experiments.records.messages import (
    BlockReport,
    ClaimedBlock,
    ClaimRequest,
    Heartbeat,
    HeartbeatReply,
    NodeRegistered,
    NodeRegistration,
    Release,
)
from experiments.runtime.logs import current_request_id
from workers.errors import ApiRefused, ApiUnreachable, SettingsError, StaleLease

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 3.0
_TRY_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})

_T = TypeVar("_T")


class ServiceApi:
    """Typed calls.

    Each raises ApiUnreachable (retry), ApiRefused (do not retry) or StaleLease (the attempt is over).
    """

    def __init__(self, url: str, token: str) -> None:
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def version(self) -> dict[str, Any]:
        """Return the service's version document; needs no key."""
        document: dict[str, Any] = self._send("GET", "/version").json()
        return document

    def key_node(self) -> str:
        """Return the name of the node to which the key belongs. Raises SettingsError for any other token."""
        identity = self._send("GET", "/v1/identity").json()
        if identity.get("node") is None:
            token = f"the token '{identity.get('name')}' with scope '{identity.get('scope')}'"
            raise SettingsError(f"ABLATE_WORKER_TOKEN is {token}, not the key of a node; get one: ablate nodes add")
        return str(identity["node"])

    def register(self, name: str, node: NodeRegistration) -> NodeRegistered:
        """Register this node, or update its registration."""
        return NodeRegistered.model_validate_json(self._send("PUT", f"/v1/nodes/{name}", node).content)

    def claim(self, request: ClaimRequest) -> ClaimedBlock | None:
        """Claim the next block for this node's class, None if no block waits."""
        answer = self._send("POST", "/v1/blocks:claim", request)
        if answer.status_code == httpx.codes.NO_CONTENT:
            return None
        return ClaimedBlock.model_validate_json(answer.content)

    def heartbeat(self, attempt_id: str, beat: Heartbeat, *, timeout_s: float = CALL_TIMEOUT_S) -> HeartbeatReply:
        """Renew the lease. A hanging call ends after `timeout_s`, so that the next may still be in time."""
        answer = self._send("POST", f"/v1/attempts/{attempt_id}:heartbeat", beat, timeout_s=timeout_s)
        return HeartbeatReply.model_validate_json(answer.content)

    def report(self, attempt_id: str, report: BlockReport) -> None:
        """Report the results of the block."""
        self._send("POST", f"/v1/attempts/{attempt_id}:report", report)

    def release(self, attempt_id: str, release: Release) -> None:
        """Give the block back to the service."""
        self._send("POST", f"/v1/attempts/{attempt_id}:release", release)

    def _send(
        self, method: str, path: str, message: BaseModel | None = None, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> httpx.Response:
        body = None if message is None else message.model_dump_json().encode()
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S))
        request_id = current_request_id()
        headers = {"Content-Type": "application/json", **({"X-Request-Id": request_id} if request_id else {})}
        try:
            answer = self._http.request(method, path, content=body, headers=headers, timeout=timeout)
        except httpx.TransportError as error:
            raise ApiUnreachable(f"{method} {path}: {type(error).__name__}: {error}") from error
        if answer.is_success:
            return answer
        detail = _detail(answer)
        if answer.status_code == httpx.codes.CONFLICT:
            raise StaleLease(detail)
        if answer.status_code in _TRY_LATER:
            raise ApiUnreachable(f"{method} {path}: status {answer.status_code}: {detail}")
        raise ApiRefused(answer.status_code, detail)


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
