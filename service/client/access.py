"""The parts of the Python client about nodes, keys and tokens."""

from collections.abc import Sequence

from ablate.service.client.connection import Connection, named, parsed
from ablate.service.schemas.nodes import KeyList, NodeList, NodePublic
from ablate.service.schemas.notifications import NotificationList, NotificationMade, NotificationPublic
from ablate.service.schemas.tokens import Identity, SignInLink, TokenList, TokenPublic, TokenSecret


class NodeStates:
    """Calls that stop and resume nodes; each returns all nodes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def drain(self, name: str) -> list[NodePublic]:
        """Let a node finish its block and give it no other."""
        return self._change("/v1/nodes/{name}:drain", name)

    def quarantine(self, name: str, *, reason: str) -> list[NodePublic]:
        """Give a node no more blocks; people will read the reason."""
        return self._change("/v1/nodes/{name}:quarantine", name, reason=reason)

    def resume(self, name: str) -> list[NodePublic]:
        """Give a drained or quarantined node work again."""
        return self._change("/v1/nodes/{name}:resume", name)

    def _change(self, route: str, name: str, **body: str) -> list[NodePublic]:
        options = {"json": body} if body else {}
        return parsed(NodeList, self._connection.call("POST", named(route, name), **options)).items


class NodeKeys:
    """Calls about the keys with which workers authenticate as their nodes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def add(self, name: str, *, node_class: str | None = None, new_class: bool = False) -> TokenSecret:
        """Issue the key of a node; it may only register with `node_class`, None for any.

        `new_class` allows one of which no machine is known, although its name is nearly another's.
        """
        body = {"name": name, "node_class": node_class, "new_class": new_class}
        return self._connection.post_once("/v1/nodes", TokenSecret, body)

    def enrol(self, node_class: str, *, uses: int, lasts_s: float, new_class: bool = False) -> TokenSecret:
        """Create a token with which so many workers of a class make nodes of themselves; `new_class` as in `add`."""
        body = {"node_class": node_class, "uses": uses, "lasts_s": lasts_s, "new_class": new_class}
        return self._connection.post_once("/v1/enrolments", TokenSecret, body)

    def revoke_enrolment(self, name: str, *, reason: str) -> None:
        """Let no other node enrol with a token."""
        self._connection.call("POST", named("/v1/enrolments/{name}:revoke", name), json={"reason": reason})

    def rotate(self, name: str, *, grace_s: float) -> TokenSecret:
        """Replace the key of a node; the old one stays valid for `grace_s`."""
        return self._connection.post_once(named("/v1/nodes/{name}:rotate-key", name), TokenSecret, {"grace_s": grace_s})

    def end_old(self, name: str) -> None:
        """End the grace period of a node's old keys now."""
        self._connection.call("POST", named("/v1/nodes/{name}:end-old-keys", name))

    def revoke(self, name: str, *, reason: str) -> None:
        """End every key of a node."""
        self._connection.call("POST", named("/v1/nodes/{name}:revoke-key", name), json={"reason": reason})


class Notifications:
    """Calls about messages at the end of this token's ablations."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def add(self, kind: str, target: str) -> NotificationMade:
        """Send a message to `target` at the end of each later ablation; kinds: webhook, slack, email."""
        return self._connection.post_once("/v1/notifications", NotificationMade, {"kind": kind, "target": target})

    def list(self) -> Sequence[NotificationPublic]:
        """Return the notifications of this token, newest first; operators get all."""
        return self._connection.get("/v1/notifications", NotificationList).items

    def remove(self, notification_id: str) -> Sequence[NotificationPublic]:
        """Send no more messages there; return the other notifications."""
        return self._connection.post(f"/v1/notifications/{notification_id}:remove", NotificationList).items


class Keys:
    """Calls about the signing keys of nodes; each returns all keys."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self) -> KeyList:
        """Return every key, revoked ones too."""
        return self._connection.get("/v1/keys", KeyList)

    def trust(self, key: str, *, node: str) -> KeyList:
        """Trust a key for a node, in place of its previous key."""
        answer = self._connection.call("POST", f"/v1/keys/{key}:trust", json={"node": node})
        return parsed(KeyList, answer)

    def revoke(self, key: str, *, reason: str) -> KeyList:
        """Reject a key's signatures from now on."""
        answer = self._connection.call("POST", f"/v1/keys/{key}:revoke", json={"reason": reason})
        return parsed(KeyList, answer)


class Tokens:
    """Calls about tokens; the service shows a new secret only once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self) -> TokenList:
        """Return every token and node key, revoked ones too, without secrets."""
        return self._connection.get("/v1/tokens", TokenList)

    def create(self, name: str, *, scope: str, device_minutes: float | None = None) -> TokenSecret:
        """Create a token; `device_minutes` limits the total of its ablations."""
        body = {"name": name, "scope": scope, "device_minutes": device_minutes}
        return self._connection.post_once("/v1/tokens", TokenSecret, body)

    def rotate(self, name: str, *, grace_s: float) -> TokenSecret:
        """Replace the secret of a token; the old one stays valid for `grace_s`."""
        return self._connection.post_once(named("/v1/tokens/{name}:rotate", name), TokenSecret, {"grace_s": grace_s})

    def end_old(self, name: str) -> TokenPublic:
        """End the grace period of a token's old secrets now."""
        return self._connection.post(named("/v1/tokens/{name}:end-old", name), TokenPublic)

    def set_quota(self, name: str, device_minutes: float | None) -> TokenPublic:
        """Limit the total device minutes of a token's ablations; None for no limit."""
        body = {"device_minutes": device_minutes}
        return self._connection.post(named("/v1/tokens/{name}:set-quota", name), TokenPublic, body)

    def revoke(self, name: str, *, reason: str) -> None:
        """Revoke a token."""
        self._connection.call("POST", named("/v1/tokens/{name}:revoke", name), json={"reason": reason})

    def sign_in(self, *, operate: bool = False) -> SignInLink:
        """Create a link that signs a browser in once, to read or also to operate."""
        return self._connection.post_once("/v1/sign-ins", SignInLink, {"operate": operate})

    def identity(self) -> Identity:
        """Return the name, scope and quota of this client's token."""
        return self._connection.get("/v1/identity", Identity)
