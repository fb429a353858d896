"""The Python client: the same verbs as the CLI, typed and synchronous.

`Client()` finds the embedded stack by itself. It raises `Refused` with the problem document for a rejected request, and
`Unreachable` for a service that does not answer. Without a stack and without ABLATE_URL it sends nothing.
"""

from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ablate.experiments.analysis.noise.history_series import HistorySeries
    from ablate.experiments.system.http_clients import HomeStack
    from ablate.service.client.ablations import Ablations, StillRunning, Trials
    from ablate.service.client.access import Keys, NodeKeys, NodeStates, Notifications, Tokens
    from ablate.service.client.connection import ClientError, Connection, Refused, ServiceFailed, Unreachable
    from ablate.service.client.sessions import Sessions
    from ablate.service.schemas.nodes import CalibrationList, NodePublic, WaitingPublic

__all__ = ["Client", "ClientError", "Refused", "ServiceFailed", "StillRunning", "Unreachable"]
_ELSEWHERE = {
    "StillRunning": "ablate.service.client.ablations",
    **dict.fromkeys(("ClientError", "Refused", "ServiceFailed", "Unreachable"), "ablate.service.client.connection"),
}


def __getattr__(name: str) -> Any:
    """Return an error's class; the HTTP packages are imported only when needed, so that commands start fast."""
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE[name]), name)


class Client:
    """A connection to the service; use it as a context manager or call `close`."""

    def __init__(self, url: str | None = None, token: str | None = None, *, stack: "HomeStack | None" = None) -> None:
        """Connect to `url` at the first call, by default to the service in ABLATE_URL or to this folder's own stack.

        `stack` is the embedded stack at `url`; its port is checked before the token is sent. The first call raises
        Unreachable if there is no address, and BadSetting for an address or a token that cannot be used.
        """
        self._target = (url, token, stack)

    @cached_property
    def _connection(self) -> "Connection":
        from ablate.service.client.connection import connection_to

        return connection_to(*self._target)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        if "_connection" in vars(self):
            self._connection.http.close()

    @property
    def url(self) -> str:
        """Base URL of the service."""
        return self._connection.url

    @cached_property
    def ablations(self) -> "Ablations":
        """Calls about ablations."""
        from ablate.service.client.ablations import Ablations

        return Ablations(self._connection)

    @cached_property
    def trials(self) -> "Trials":
        """Calls about trials."""
        from ablate.service.client.ablations import Trials

        return Trials(self._connection)

    @cached_property
    def sessions(self) -> "Sessions":
        """Calls about sessions, which try many proposals under one error budget."""
        from ablate.service.client.sessions import Sessions

        return Sessions(self._connection, self.ablations)

    @cached_property
    def keys(self) -> "Keys":
        """Calls about the signing keys of nodes."""
        from ablate.service.client.access import Keys

        return Keys(self._connection)

    @cached_property
    def notifications(self) -> "Notifications":
        """Calls about messages at the end of this token's ablations."""
        from ablate.service.client.access import Notifications

        return Notifications(self._connection)

    @cached_property
    def tokens(self) -> "Tokens":
        """Calls about tokens."""
        from ablate.service.client.access import Tokens

        return Tokens(self._connection)

    @cached_property
    def node_keys(self) -> "NodeKeys":
        """Calls about the keys with which workers authenticate as their nodes."""
        from ablate.service.client.access import NodeKeys

        return NodeKeys(self._connection)

    @cached_property
    def node_states(self) -> "NodeStates":
        """Calls that stop and resume nodes."""
        from ablate.service.client.access import NodeStates

        return NodeStates(self._connection)

    def history(
        self, recipe: str, *, metric: str = "tokens_per_s", node_class: str | None = None
    ) -> "list[HistorySeries]":
        """Return the baselines of a recipe over time, one series for every configuration and device."""
        from ablate.experiments.analysis.noise.history_series import HistorySeries
        from ablate.service.client.connection import parsed

        params = {"metric": metric, **({"node_class": node_class} if node_class else {})}
        return parsed(list[HistorySeries], self._connection.call("GET", f"/v1/history/{recipe}", params=params))

    def calibrations(self) -> "CalibrationList":
        """Return the calibrations of the nodes and the service's own rate of false verdicts."""
        from ablate.service.schemas.nodes import CalibrationList

        return self._connection.get("/v1/calibrations", CalibrationList)

    def nodes(self) -> "list[NodePublic]":
        """Return the nodes that have registered."""
        from ablate.service.schemas.nodes import NodeList

        return self._connection.get("/v1/nodes", NodeList).items

    def waiting(self) -> "list[WaitingPublic]":
        """Return the device minutes that wait, by node class and number of devices."""
        from ablate.service.schemas.nodes import WaitingList

        return self._connection.get("/v1/waiting", WaitingList).items
