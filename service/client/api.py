"""The Python client: the same verbs as the CLI, typed and synchronous.

`Client()` finds the embedded stack by itself. What the service refuses is raised as `Refused` with its problem
document; a service that cannot be reached as `Unreachable`.
"""

from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.analysis.noise.history_series import HistorySeries
    from experiments.design.listings import GatePublic
    from service.client.ablations import Ablations, StillRunning, Trials

    pass
    pass
    from service.client.connection import ClientError, Refused, ServiceFailed, Unreachable
    from service.schemas.calibrations import CalibrationList
    from service.schemas.nodes import NodePublic

from service.client.connection import Connection, named
from service.schemas.nodes import KeyList, NodeList, NodePublic
from service.schemas.tokens import Identity, SignInLink, TokenList, TokenPublic, TokenSecret


class NodeStates:
    """Calls about whether nodes take work; each returns all nodes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def drain(self, name: str) -> list[NodePublic]:
        """Let a node finish its block and give it no other."""
        return self._change("/v1/nodes/{name}:drain", name)

    def quarantine(self, name: str, *, reason: str) -> list[NodePublic]:
        """Give a node nothing more, for a reason that people read."""
        return self._change("/v1/nodes/{name}:quarantine", name, reason=reason)

    def resume(self, name: str) -> list[NodePublic]:
        """Give a drained or quarantined node work again."""
        return self._change("/v1/nodes/{name}:resume", name)

    def _change(self, route: str, name: str, **body: str) -> list[NodePublic]:
        options = {"json": body} if body else {}
        return NodeList.model_validate(self._connection.call("POST", named(route, name), **options).json()).items


class NodeKeys:
    """Calls about the keys with which workers speak for their nodes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def add(self, name: str, *, node_class: str | None = None) -> TokenSecret:
        """Issue the key of a node, which may only be of `node_class`."""
        return self._connection.post_once("/v1/nodes", TokenSecret, {"name": name, "node_class": node_class})

    def rotate(self, name: str, *, grace_s: float) -> TokenSecret:
        """Replace the key of a node; the one before it counts for `grace_s`."""
        return self._connection.post_once(named("/v1/nodes/{name}:rotate-key", name), TokenSecret, {"grace_s": grace_s})

    def end_old(self, name: str) -> None:
        """End the keys of a node that were replaced, now."""
        self._connection.call("POST", named("/v1/nodes/{name}:end-old-keys", name))

    def revoke(self, name: str, *, reason: str) -> None:
        """End every key of a node."""
        self._connection.call("POST", named("/v1/nodes/{name}:revoke-key", name), json={"reason": reason})


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


class Tokens:
    """Calls about tokens; whoever gets a fresh secret is the only one who ever sees it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self) -> TokenList:
        """Return every token and node key, revoked ones too, without secrets."""
        return self._connection.get("/v1/tokens", TokenList)

    def create(self, name: str, *, scope: str, device_minutes: float | None = None) -> TokenSecret:
        """Create a token; `device_minutes` limits what its ablations may use in all."""
        body = {"name": name, "scope": scope, "device_minutes": device_minutes}
        return self._connection.post_once("/v1/tokens", TokenSecret, body)

    def rotate(self, name: str, *, grace_s: float) -> TokenSecret:
        """Replace the secret of a token; the one before it counts for `grace_s`."""
        return self._connection.post_once(named("/v1/tokens/{name}:rotate", name), TokenSecret, {"grace_s": grace_s})

    def end_old(self, name: str) -> TokenPublic:
        """End the secrets of a token that were replaced, now."""
        return self._connection.post(named("/v1/tokens/{name}:end-old", name), TokenPublic)

    def set_quota(self, name: str, device_minutes: float | None) -> TokenPublic:
        """Let the ablations of a token use so many device minutes in all, None for no limit."""
        body = {"device_minutes": device_minutes}
        return self._connection.post(named("/v1/tokens/{name}:set-quota", name), TokenPublic, body)

    def revoke(self, name: str, *, reason: str) -> None:
        """End a token."""
        self._connection.call("POST", named("/v1/tokens/{name}:revoke", name), json={"reason": reason})

    def sign_in(self, *, operate: bool = False) -> SignInLink:
        """Make a link that signs a browser in once, to read or also to operate."""
        return self._connection.post_once("/v1/sign-ins", SignInLink, {"operate": operate})

    def identity(self) -> Identity:
        """Return who this client is to the service."""
        return self._connection.get("/v1/identity", Identity)


__all__ = ["Client", "ClientError", "Refused", "ServiceFailed", "StillRunning", "Unreachable"]
_ELSEWHERE = {
    "StillRunning": "service.client.ablations",
    **dict.fromkeys(("ClientError", "Refused", "ServiceFailed", "Unreachable"), "service.client.connection"),
}


def __getattr__(name: str) -> Any:
    """Return an error's class; all that speaks HTTP is imported when it is needed, so that programs start fast."""
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE[name]), name)


class Client:
    """A connection to the service; use it as a context manager or call `close`."""

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        from service.client.connection import Connection
        from service.client.settings import get_client_settings

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
    def ablations(self) -> "Ablations":
        """Calls about ablations."""
        from service.client.ablations import Ablations

        return Ablations(self._connection)

    @cached_property
    def trials(self) -> "Trials":
        """Calls about trials."""
        from service.client.ablations import Trials

        return Trials(self._connection)

    @cached_property
    def keys(self) -> "Keys":
        """Calls about the keys of nodes."""
        pass

        return Keys(self._connection)

    @cached_property
    def tokens(self) -> "Tokens":
        """Calls about tokens."""
        pass

        return Tokens(self._connection)

    @cached_property
    def node_keys(self) -> "NodeKeys":
        """Calls about the keys with which workers speak for their nodes."""
        pass

        return NodeKeys(self._connection)

    @cached_property
    def node_states(self) -> "NodeStates":
        """Calls about whether nodes take work."""
        pass

        return NodeStates(self._connection)

    def gates(self) -> "list[GatePublic]":
        """Return what can be asked for."""
        from experiments.design.listings import GatePublic

        return [GatePublic.model_validate(gate) for gate in self._connection.call("GET", "/v1/gates").json()]

    def history(
        self, recipe: str, *, metric: str = "tokens_per_s", node_class: str | None = None
    ) -> "list[HistorySeries]":
        """Return the baselines of a recipe over time, a series for every configuration and device."""
        from experiments.analysis.noise.history_series import HistorySeries

        asked = {"metric": metric, **({"node_class": node_class} if node_class else {})}
        rows = self._connection.call("GET", f"/v1/history/{recipe}", params=asked).json()
        return [HistorySeries.model_validate(row) for row in rows]

    def calibrations(self) -> "CalibrationList":
        """Return what is known about the noise of the nodes, and the service's own rate of false words."""
        from service.schemas.calibrations import CalibrationList

        return self._connection.get("/v1/calibrations", CalibrationList)

    def nodes(self) -> "list[NodePublic]":
        """Return the nodes that have registered."""
        from service.schemas.nodes import NodeList

        return self._connection.get("/v1/nodes", NodeList).items
