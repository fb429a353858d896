"""The Python client: the same verbs as the CLI, typed and synchronous.

`Client()` finds the embedded stack by itself. What the service refuses is raised as `Refused` with its problem
document; a service that cannot be reached as `Unreachable`.
"""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import httpx
import httpx_sse

from experiments.analysis.history import HistorySeries
from experiments.analysis.verdicts import Verdict
from experiments.design.gate import GatePublic
from experiments.records.signed_receipt import SignedReceipt
from service.client_access import NodeKeys, Tokens
from service.client_nodes import NodeStates
from service.connection import PAUSE_S, ClientError, Connection, Refused, ServiceFailed, Unreachable, checked
from service.lifecycle import EventKind
from service.schemas.ablations import AblationPublic, BlockPublic, TrialPublic
from service.schemas.calibrations import CalibrationList
from service.schemas.events import Event
from service.schemas.imports import ImportPublic
from service.schemas.nodes import KeyList, NodeList, NodePublic
from service.schemas.submissions import AblationAccepted, PlanPublic, SpecBody, SpecText
from service.settings import get_client_settings

__all__ = ["Client", "ClientError", "Refused", "ServiceFailed", "Unreachable"]

_STREAM_TIMEOUT = httpx.Timeout(60.0, connect=3.0)
_WATCH_PATIENCE_S = 60.0
"""How long a watcher tries to reach a service that went away."""


class Ablations:
    """Calls about ablations."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def plan(self, spec: SpecBody | Mapping[str, Any]) -> PlanPublic:
        """Say what a spec would run, without running it."""
        body = SpecBody.of(spec)
        answer = self._connection.call(
            "POST", "/v1/ablations:plan", content=body.content, headers={"Content-Type": body.content_type}
        )
        return PlanPublic.model_validate(answer.json())

    def submit(self, spec: SpecBody | Mapping[str, Any], *, idempotency_key: str | None = None) -> AblationAccepted:
        """Submit a spec; the same key with the same spec gives the same ablation."""
        body = SpecBody.of(spec)
        headers = {"Content-Type": body.content_type, "Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        answer = self._connection.call("POST", "/v1/ablations", content=body.content, headers=headers)
        return AblationAccepted.model_validate(answer.json())

    def import_bundles(
        self, bundles: Sequence[Mapping[str, str]], *, trust: Sequence[str] = (), unsigned: bool = False
    ) -> ImportPublic:
        """Take in bundles of one plan, each as the text of its files by path; again changes nothing.

        Keys in `trust` are trusted from now on; `unsigned` takes files that nobody signed.
        """
        body = {"bundles": [{"files": dict(files)} for files in bundles], "trust": list(trust), "unsigned": unsigned}
        answer = self._connection.call("POST", "/v1/ablations:import", json=body)
        return ImportPublic.model_validate(answer.json())

    def get(self, ablation_id: str) -> AblationPublic:
        """Return one ablation."""
        return self._connection.get(f"/v1/ablations/{ablation_id}", AblationPublic)

    def list(self, *, state: str | None = None, label: str | None = None) -> Iterator[AblationPublic]:
        """Yield ablations, newest first."""
        return self._connection.pages("/v1/ablations", AblationPublic, {"state": state, "label": label})

    def blocks(self, ablation_id: str) -> Iterator[BlockPublic]:
        """Yield the blocks of one ablation."""
        return self._connection.pages(f"/v1/ablations/{ablation_id}/blocks", BlockPublic, {})

    def trials(self, ablation_id: str) -> Iterator[TrialPublic]:
        """Yield the trials of one ablation."""
        return self._connection.pages(f"/v1/ablations/{ablation_id}/trials", TrialPublic, {})

    def cancel(self, ablation_id: str) -> AblationPublic:
        """Ask for the end of an ablation; it is `cancelling` until its worker has stopped."""
        return AblationPublic.model_validate(
            self._connection.call("POST", f"/v1/ablations/{ablation_id}:cancel").json()
        )

    def set_priority(self, ablation_id: str, priority: int) -> AblationPublic:
        """Change the priority of what is not over; higher runs first."""
        answer = self._connection.call("PATCH", f"/v1/ablations/{ablation_id}", json={"priority": priority})
        return AblationPublic.model_validate(answer.json())

    def verdict(self, ablation_id: str) -> Verdict:
        """Return the verdict; raises Refused (409) before there is one."""
        return self._connection.get(f"/v1/ablations/{ablation_id}/verdict", Verdict)

    def spec(self, ablation_id: str) -> SpecBody:
        """Return the spec as it was submitted."""
        found = self._connection.get(f"/v1/ablations/{ablation_id}/spec", SpecText)
        return SpecBody(content=found.text.encode(), content_type=found.content_type)

    def report(self, ablation_id: str) -> str:
        """Return the report as one HTML page; raises Refused (409) before there is one."""
        return self._connection.call("GET", f"/v1/ablations/{ablation_id}/report").text

    def watch(self, ablation_id: str, *, after: int = 0) -> Iterator[Event]:
        """Yield events from the one after sequence number `after` to `end`; reconnects where it was cut off.

        Raises Unreachable when the service stays away.
        """
        lost_at: float | None = None
        while True:
            try:
                for event in self._stream(ablation_id, after):
                    lost_at, after = None, max(after, event.seq)
                    yield event
                    if event.kind == EventKind.END:
                        return
            except httpx.TransportError as error:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > _WATCH_PATIENCE_S:
                    raise self._connection.unreachable(error) from error
            time.sleep(PAUSE_S)

    def _stream(self, ablation_id: str, after: int) -> Iterator[Event]:
        path, headers = f"/v1/ablations/{ablation_id}/events", {"Last-Event-ID": str(after)}
        with httpx_sse.connect_sse(
            self._connection.http, "GET", path, headers=headers, timeout=_STREAM_TIMEOUT
        ) as source:
            if not source.response.is_success:
                source.response.read()
                checked(source.response)
            for message in source.iter_sse():
                if not message.data:  # a keep-alive comment
                    continue
                yield Event.of(message.event, message.id, message.json())


class Trials:
    """Calls about trials."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def receipt(self, trial_id: str) -> SignedReceipt:
        """Return the receipt of a trial with its block's signature; raises Refused before there is one."""
        return self._connection.get(f"/v1/trials/{trial_id}/receipt", SignedReceipt)

    def log(self, trial_id: str, *, offset: int = 0) -> tuple[str, int]:
        """Return the log from a byte offset, and the offset where it ends."""
        answer = self._connection.call("GET", f"/v1/trials/{trial_id}/log", params={"offset": offset})
        return answer.text, int(answer.headers["X-Log-End-Offset"])


class Keys:
    """Calls about the keys of nodes; each returns all of them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self) -> KeyList:
        """Return every key, revoked ones too."""
        return self._connection.get("/v1/keys", KeyList)

    def trust(self, key: str, *, node: str) -> KeyList:
        """Trust a key for a node, in place of the one that it had."""
        answer = self._connection.call("POST", f"/v1/keys/{key}:trust", json={"node": node})
        return KeyList.model_validate(answer.json())

    def revoke(self, key: str, *, reason: str) -> KeyList:
        """Take nothing more that a key signs."""
        answer = self._connection.call("POST", f"/v1/keys/{key}:revoke", json={"reason": reason})
        return KeyList.model_validate(answer.json())


class Client:
    """A connection to the service; use it as a context manager or call `close`."""

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        settings = get_client_settings()
        self._connection = Connection(url or settings.api_url, token or settings.bearer_token)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._connection.http.close()

    @property
    def url(self) -> str:
        """Base URL of the service."""
        return self._connection.url

    @cached_property
    def ablations(self) -> Ablations:
        """Calls about ablations."""
        return Ablations(self._connection)

    @cached_property
    def trials(self) -> Trials:
        """Calls about trials."""
        return Trials(self._connection)

    @cached_property
    def keys(self) -> Keys:
        """Calls about the keys of nodes."""
        return Keys(self._connection)

    @cached_property
    def tokens(self) -> Tokens:
        """Calls about tokens."""
        return Tokens(self._connection)

    @cached_property
    def node_keys(self) -> NodeKeys:
        """Calls about the keys with which workers speak for their nodes."""
        return NodeKeys(self._connection)

    @cached_property
    def node_states(self) -> NodeStates:
        """Calls about whether nodes take work."""
        return NodeStates(self._connection)

    def gates(self) -> list[GatePublic]:
        """Return what can be asked for."""
        return [GatePublic.model_validate(gate) for gate in self._connection.call("GET", "/v1/gates").json()]

    def history(
        self, recipe: str, *, metric: str = "tokens_per_s", node_class: str | None = None
    ) -> list[HistorySeries]:
        """Return the baselines of a recipe over time, a series for every configuration and device."""
        asked = {"metric": metric, **({"node_class": node_class} if node_class else {})}
        rows = self._connection.call("GET", f"/v1/history/{recipe}", params=asked).json()
        return [HistorySeries.model_validate(row) for row in rows]

    def calibrations(self) -> CalibrationList:
        """Return what is known about the noise of the nodes, and the service's own rate of false words."""
        return self._connection.get("/v1/calibrations", CalibrationList)

    def nodes(self) -> list[NodePublic]:
        """Return the nodes that have registered."""
        return self._connection.get("/v1/nodes", NodeList).items
