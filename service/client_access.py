"""The part of the Python client that gives and takes access: tokens."""

from service.connection import Connection, named
from service.schemas.tokens import Identity, SignInLink, TokenList, TokenPublic, TokenSecret


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
