"""Signing in to the pages: a short-lived link that works once, and the session that it becomes.

Both are secrets; the digests are stored, with the digest of the token's secret that asked for them. They end with that
secret.
"""

import secrets
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, Select, delete, insert, select

from ablate.service.principals import Scope
from ablate.service.store.access import tokens
from ablate.service.store.tables import db_now, token_secrets, web_sessions
from ablate.service.store.tables import tokens as token_rows

LINK_S = 120.0
"""Lifetime of an unused link, in seconds."""
SESSION_S = 12 * 3600.0
"""Lifetime of a session, in seconds: a working day."""


class SecretKind(StrEnum):
    """The purpose of a secret of the pages."""

    LINK = "link"
    SESSION = "session"


def add_link(connection: Connection, token_id: str, secret_digest: str, scope: Scope) -> str:
    """Store a link for a token's secret and return the link's secret; delete ended links and sessions."""
    connection.execute(delete(web_sessions).where(web_sessions.c.ends_at <= db_now()))
    return _add(connection, SecretKind.LINK, token_id, secret_digest, scope)


def _add(connection: Connection, kind: SecretKind, token_id: str, secret_digest: str, scope: str) -> str:
    secret = secrets.token_urlsafe(32)
    lasts_s = LINK_S if kind is SecretKind.LINK else SESSION_S
    values = {"token_id": token_id, "secret_digest": secret_digest, "scope": scope, "ends_at": db_now() + lasts_s}
    connection.execute(insert(web_sessions).values(digest=tokens.secret_digest(secret), kind=kind, **values))
    return secret


def find(connection: Connection, kind: SecretKind, secret: str) -> Row[Any] | None:
    """Return the token behind a valid link or session, with its `session_scope`; None if it is not valid."""
    return connection.execute(_valid(kind, secret)).first()


def _valid(kind: SecretKind, secret: str) -> Select[Any]:
    query = select(token_rows, web_sessions.c.scope.label("session_scope"), web_sessions.c.secret_digest)
    query = query.join(web_sessions, web_sessions.c.token_id == token_rows.c.id)
    query = query.join(token_secrets, token_secrets.c.digest == web_sessions.c.secret_digest)
    mine = (web_sessions.c.digest == tokens.secret_digest(secret), web_sessions.c.kind == kind)
    return query.where(*mine, web_sessions.c.ends_at > db_now(), token_rows.c.revoked_at.is_(None), tokens.counts())


def use_link(connection: Connection, secret: str) -> str | None:
    """Turn a link into a session and return the session's secret; None if the link is not valid.

    Of several concurrent users of a link, the one that deletes it gets a session.
    """
    row = find(connection, SecretKind.LINK, secret)
    if row is None or not _delete(connection, secret):
        return None
    return _add(connection, SecretKind.SESSION, row.id, row.secret_digest, row.session_scope)


def end(connection: Connection, secret: str) -> None:
    """End a session. A second call changes nothing."""
    _delete(connection, secret)


def _delete(connection: Connection, secret: str) -> int:
    return connection.execute(
        delete(web_sessions).where(web_sessions.c.digest == tokens.secret_digest(secret))
    ).rowcount
