"""The part of the Python client that stops nodes and lets them go on."""

from urllib.parse import quote

from service.connection import Connection
from service.schemas.nodes import NodeList, NodePublic


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
        path = route.format(name=quote(name, safe=""))
        options = {"json": body} if body else {}
        return NodeList.model_validate(self._connection.call("POST", path, **options).json()).items
