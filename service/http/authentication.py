"""Bearer tokens: who is behind a secret. Lookups are cached for a few seconds."""

import secrets
import threading
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Row
from tenacity import retry, retry_if_exception_type, stop_after_attempt

from service.errors import ConfigurationError, NameTaken, Unauthorized
from service.principals import Principal, Scope
from service.settings import ServiceSettings
from service.store.access import tokens
from service.store.session import Store

CACHE_S = 10.0
"""So long may a revoked secret go on in API processes other than the one that revoked it."""
MAX_CACHED = 10_000


class Authenticator:
    """Finds the principal behind a secret."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cache: dict[str, tuple[float, Principal]] = {}
        self._lock = threading.Lock()

    def cached(self, secret: str) -> Principal | None:
        """Return the principal if it was looked up lately; never touches the database."""
        known = self._cache.get(tokens.secret_digest(secret))
        return known[1] if known and known[0] > time.monotonic() else None

    def lookup(self, secret: str) -> Principal:
        """Return the principal from the database. Raises Unauthorized: not known, or why it does not count any more."""
        digest, asked_at = tokens.secret_digest(secret), time.monotonic()
        cache = self._cache  # a revocation that comes meanwhile puts another one in its place
        with self._store.read() as connection:
            row = tokens.find(connection, digest)
        if row is None or not row.counts:
            raise Unauthorized(_why_not(row))
        principal = _principal(row)
        with self._lock:
            if len(cache) >= MAX_CACHED:
                cache.clear()
            cache[digest] = (asked_at + min(CACHE_S, CACHE_S if row.left_s is None else row.left_s), principal)
        return principal

    def forget(self) -> None:
        """Look every secret up again: one was revoked, or means something else."""
        with self._lock:
            self._cache = {}


def _why_not(row: Row[Any] | None) -> str:
    """Tell who holds a secret that counted once how it ended, and nothing else: it may be stolen."""
    if row is None:
        return "this bearer token is not known"
    what = "this bearer token" if row.node is None else f"this key of node '{row.node}'"
    anew = (
        "an administrator issues another"
        if row.node is None
        else f"an operator issues another: ablate nodes {{}} {row.node}"
    )
    if row.revoked_at is not None:
        return f"{what} was revoked; {anew.format('add')}"
    return f"{what} was replaced, and the time for which it still counted is over; {anew.format('rotate-key')}"


def _principal(row: Row[Any]) -> Principal:
    return Principal(
        token_id=row.id,
        name=row.name,
        scope=Scope(row.scope),
        node=row.node,
        node_class=row.node_class,
        device_minutes=row.device_minutes,
    )


def bootstrap(store: Store, settings: ServiceSettings) -> None:
    """Make sure that the administrator `admin` exists, and the key of the node that comes with this installation.

    Their secrets come from the settings; on loopback those that are not set are generated into the home folder.
    Raises ConfigurationError when the settings do not allow a start.
    """
    found = {name: settings.checked_secret(name) for name in ("admin", "worker")}
    if settings.makes_tokens:
        found = {name: secret or _generated(settings.home, name) for name, secret in found.items()}
    if found["admin"] == found["worker"]:
        raise ConfigurationError("ABLATE_ADMIN_TOKEN and ABLATE_WORKER_TOKEN are the same; give each its own secret")
    meant = {
        "admin": tokens.NewToken(name="admin", scope=Scope.ADMIN),
        "worker": tokens.node_token(settings.node_name),
    }
    _store(store, [(meant[name], secret) for name, secret in found.items() if secret is not None])


@retry(retry=retry_if_exception_type(NameTaken), stop=stop_after_attempt(3), reraise=True)
def _store(store: Store, wanted: list[tuple[tokens.NewToken, str]]) -> None:
    """Store the tokens of the settings; another process of the API may do the same at this moment."""
    with store.write() as connection:
        tokens.replace_settings_tokens(connection, wanted)


def _generated(home: Path, name: str) -> str:
    path = home / "tokens" / name
    if path.is_file():
        return path.read_text().strip()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    secret = secrets.token_urlsafe(32)
    path.touch(mode=0o600)
    path.write_text(secret + "\n")
    return secret
