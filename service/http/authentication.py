"""Bearer tokens: the principal behind a secret, cached for a few seconds, and the rate limit of each token."""

import math
import threading
import time
from typing import Any

from sqlalchemy import Row
from tenacity import retry, retry_if_exception_type, stop_after_attempt

from ablate.service.errors import ConfigurationError, NameTaken, TooManyRequests, Unauthorized
from ablate.service.principals import Principal, Scope
from ablate.service.settings import ServiceSettings, generated_secret
from ablate.service.store.access import tokens
from ablate.service.store.session import Store

CACHE_S = 10.0
"""A revoked secret may stay valid for this long in API processes other than the one that revoked it."""
MAX_CACHED = 10_000
_NS = 1_000_000_000


class Authenticator:
    """Finds the principal behind a secret."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cache: dict[str, tuple[float, Principal]] = {}
        self._lock = threading.Lock()

    def cached(self, secret: str) -> Principal | None:
        """Return the principal if it was looked up recently; never touches the database."""
        entry = self._cache.get(tokens.secret_digest(secret))
        return entry[1] if entry and entry[0] > time.monotonic() else None

    def lookup(self, secret: str) -> Principal:
        """Return the principal from the database. Raises Unauthorized with the reason why the secret is not valid."""
        digest, began_at = tokens.secret_digest(secret), time.monotonic()
        cache = self._cache  # a revocation during the query replaces it
        with self._store.read() as connection:
            row = tokens.find(connection, digest)
        if row is None or not row.counts:
            raise Unauthorized(_why_not(row))
        principal = _principal(row)
        with self._lock:
            if len(cache) >= MAX_CACHED:
                cache.clear()
            cache[digest] = (began_at + min(CACHE_S, CACHE_S if row.left_s is None else row.left_s), principal)
        return principal

    def forget(self) -> None:
        """Empty the cache, because a secret was revoked or its token changed."""
        with self._lock:
            self._cache = {}


def _why_not(row: Row[Any] | None) -> str:
    """Say why a formerly valid secret is no longer accepted, and nothing else: it may be stolen."""
    if row is None:
        return "unknown bearer token"
    if row.scope == Scope.ENROL:
        how = "has expired" if row.revoked_at is None else f"was revoked: {row.reason}"
        return f"this enrolment token {how}; an operator makes another: ablate nodes enrol {row.node_class}"
    what = "this bearer token" if row.node is None else f"this key of node '{row.node}'"
    remedy = (
        "an administrator issues another"
        if row.node is None
        else f"an operator issues another: ablate nodes {{}} {row.node}"
    )
    if row.revoked_at is not None:
        return f"{what} was revoked; {remedy.format('add')}"
    return f"{what} was replaced, and its grace period is over; {remedy.format('rotate-key')}"


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
    """Store the tokens of the administrator `admin` and of the node that comes with this installation.

    Their secrets come from the settings. On loopback, missing ones are generated into the home folder. Raises
    ConfigurationError when the settings do not allow a start.
    """
    secret_of = {name: settings.checked_secret(name) for name in ("admin", "worker")}
    if settings.makes_tokens:
        secret_of = {
            name: secret or generated_secret(settings.home / "tokens" / name) for name, secret in secret_of.items()
        }
    if secret_of["admin"] == secret_of["worker"]:
        raise ConfigurationError("ABLATE_ADMIN_TOKEN and ABLATE_WORKER_TOKEN are the same; give each its own secret")
    token_of = {
        "admin": tokens.NewToken(name="admin", scope=Scope.ADMIN),
        "worker": tokens.node_token(settings.node_name),
    }
    _store(store, [(token_of[name], secret) for name, secret in secret_of.items() if secret is not None])


@retry(retry=retry_if_exception_type(NameTaken), stop=stop_after_attempt(3), reraise=True)
def _store(store: Store, wanted: list[tuple[tokens.NewToken, str]]) -> None:
    """Store the tokens of the settings; another API process may do the same at this moment."""
    with store.write() as connection:
        tokens.replace_settings_tokens(connection, wanted)


class RateLimiter:
    """Limits the requests of each token to a steady rate with a burst; for the event loop's thread only.

    It is a token bucket in the form of the generic cell rate algorithm, in whole nanoseconds. Per token it stores the
    moment at which the whole burst is available again.
    """

    def __init__(self, *, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._interval_ns = round(_NS / per_s)
        self._tolerance_ns = (burst - 1) * self._interval_ns
        self._whole_at_ns: dict[str, int] = {}

    def spend(self, token_id: str) -> None:
        """Count one request of the token. Raises TooManyRequests when its burst is used up."""
        now = time.monotonic_ns()
        whole_at = max(self._whole_at_ns.get(token_id, now), now)
        wait_ns = whole_at - now - self._tolerance_ns
        if wait_ns > 0:
            wait_s = math.ceil(wait_ns / _NS)
            raise TooManyRequests(
                f"this token sent more than {self._per_s:g} requests per second; wait {wait_s} s",
                headers={"Retry-After": str(wait_s)},
            )
        self._whole_at_ns[token_id] = whole_at + self._interval_ns
