"""Bearer tokens: random secrets, stored as SHA-256, each with one scope. Lookups are cached for a few seconds."""

import secrets
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sqlalchemy import Connection, insert, select, update

from experiments.digest import digest_bytes
from experiments.ids import new_id
from service.errors import ConfigurationError
from service.settings import ServiceSettings
from service.store.columns import db_now
from service.store.session import Store
from service.store.tables import tokens

CACHE_S = 10.0
MAX_CACHED = 10_000


class Scope(StrEnum):
    """What a token may do. Each human scope includes the ones before it; a worker key stands apart."""

    READ = "read"
    SUBMIT = "submit"
    OPERATE = "operate"
    ADMIN = "admin"
    WORKER = "worker"

    def includes(self, needed: "Scope") -> bool:
        """Tell whether a token of this scope may do what `needed` is asked for."""
        if Scope.WORKER in (self, needed):
            return self == needed
        ranks = list(Scope)
        return ranks.index(self) >= ranks.index(needed)


@dataclass(frozen=True, kw_only=True)
class Principal:
    """Who sent a request."""

    token_id: str
    name: str
    scope: Scope


class Authenticator:
    """Finds the principal behind a secret."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cache: dict[str, tuple[float, Principal]] = {}
        self._lock = threading.Lock()

    def cached(self, secret: str) -> Principal | None:
        """Return the principal if it was looked up lately; never touches the database."""
        known = self._cache.get(_digest(secret))
        return known[1] if known and known[0] > time.monotonic() else None

    def lookup(self, secret: str) -> Principal | None:
        """Return the principal from the database, None for an unknown secret."""
        found = _digest(secret)
        query = select(tokens.c.id, tokens.c.name, tokens.c.scope).where(tokens.c.digest == found)
        with self._store.read() as connection:
            row = connection.execute(query).first()
        if row is None:
            return None
        principal = Principal(token_id=row.id, name=row.name, scope=Scope(row.scope))
        with self._lock:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            self._cache[found] = (time.monotonic() + CACHE_S, principal)
        return principal


def _digest(secret: str) -> str:
    return digest_bytes(secret.encode("utf-8", "surrogateescape"))


def put_token(connection: Connection, name: str, scope: Scope, secret: str) -> None:
    """Store a token under `name`; an earlier secret of that name stops working."""
    values = {"scope": scope.value, "digest": _digest(secret)}
    known = connection.execute(select(tokens.c.digest).where(tokens.c.name == name).with_for_update()).scalar()
    if known is None:
        connection.execute(insert(tokens).values(id=new_id("tok"), name=name, created_at=db_now(), **values))
    elif known != values["digest"]:
        connection.execute(update(tokens).where(tokens.c.name == name).values(**values))


def bootstrap(store: Store, settings: ServiceSettings) -> None:
    """Make sure that the tokens `admin` and `worker` exist: from the settings, else generated into the home folder.

    Raises ConfigurationError when the settings do not allow a start.
    """
    chosen = {name: settings.checked_secret(name) for name in ("admin", "worker")}
    secrets_by_name = {name: secret or _generated(settings.home, name) for name, secret in chosen.items()}
    if len(set(secrets_by_name.values())) != len(secrets_by_name):
        raise ConfigurationError("ABLATE_ADMIN_TOKEN and ABLATE_WORKER_TOKEN are the same; give each its own secret")
    with store.write() as connection:
        put_token(connection, "admin", Scope.ADMIN, secrets_by_name["admin"])
        put_token(connection, "worker", Scope.WORKER, secrets_by_name["worker"])


def _generated(home: Path, name: str) -> str:
    path = home / "tokens" / name
    if path.is_file():
        return path.read_text().strip()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    secret = secrets.token_urlsafe(32)
    path.touch(mode=0o600)
    path.write_text(secret + "\n")
    return secret
