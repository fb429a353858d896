"""The Python client: the same verbs as the CLI, typed and synchronous.

`Client()` finds the embedded stack by itself. What the service refuses is raised as `Refused` with its problem
document; a service that cannot be reached as `Unreachable`.
"""

from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.analysis.history_series import HistorySeries
    from experiments.design.gate import GatePublic
    from service.client_ablations import Ablations, StillRunning, Trials
    from service.client_access import Tokens
    from service.client_nodes import Keys, NodeKeys, NodeStates
    from service.connection import ClientError, Refused, ServiceFailed, Unreachable
    from service.schemas.calibrations import CalibrationList
    from service.schemas.nodes import NodePublic

__all__ = ["Client", "ClientError", "Refused", "ServiceFailed", "StillRunning", "Unreachable"]
_ELSEWHERE = {
    "StillRunning": "service.client_ablations",
    **dict.fromkeys(("ClientError", "Refused", "ServiceFailed", "Unreachable"), "service.connection"),
}


def __getattr__(name: str) -> Any:
    """Return an error's class; all that speaks HTTP is imported when it is needed, so that programs start fast."""
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE[name]), name)


class Client:
    """A connection to the service; use it as a context manager or call `close`."""

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        from service.client_settings import get_client_settings
        from service.connection import Connection

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
        from service.client_ablations import Ablations

        return Ablations(self._connection)

    @cached_property
    def trials(self) -> "Trials":
        """Calls about trials."""
        from service.client_ablations import Trials

        return Trials(self._connection)

    @cached_property
    def keys(self) -> "Keys":
        """Calls about the keys of nodes."""
        from service.client_nodes import Keys

        return Keys(self._connection)

    @cached_property
    def tokens(self) -> "Tokens":
        """Calls about tokens."""
        from service.client_access import Tokens

        return Tokens(self._connection)

    @cached_property
    def node_keys(self) -> "NodeKeys":
        """Calls about the keys with which workers speak for their nodes."""
        from service.client_nodes import NodeKeys

        return NodeKeys(self._connection)

    @cached_property
    def node_states(self) -> "NodeStates":
        """Calls about whether nodes take work."""
        from service.client_nodes import NodeStates

        return NodeStates(self._connection)

    def gates(self) -> "list[GatePublic]":
        """Return what can be asked for."""
        from experiments.design.gate import GatePublic

        return [GatePublic.model_validate(gate) for gate in self._connection.call("GET", "/v1/gates").json()]

    def history(
        self, recipe: str, *, metric: str = "tokens_per_s", node_class: str | None = None
    ) -> "list[HistorySeries]":
        """Return the baselines of a recipe over time, a series for every configuration and device."""
        from experiments.analysis.history_series import HistorySeries

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
