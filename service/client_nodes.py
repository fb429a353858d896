"""The parts of the Python client about nodes: whether they take work, the keys that they come and sign with."""

from service.connection import Connection, named
from service.schemas.nodes import KeyList, NodeList, NodePublic
from service.schemas.tokens import TokenSecret


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
