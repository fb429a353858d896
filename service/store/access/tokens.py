"""Tokens of people and nodes: a name, a scope, and the SHA-256 of its secrets. Several are valid during a rotation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from ablate.experiments.digest import digest_bytes
from ablate.experiments.ids import fresh_secret, new_id
from ablate.service.errors import ConfigurationError, Invalid, NameTaken, NotFound, NotOwner, TokenOfSettings
from ablate.service.principals import Principal, Scope
from ablate.service.store.tables import ablations, db_now, share_links, token_secrets, tokens

SETTINGS = "settings"
"""Creator of the tokens whose secrets are in the settings."""
_KEY = "node/"


@dataclass(frozen=True, kw_only=True)
class NewToken:
    """A token to create."""

    name: str
    scope: Scope
    node: str | None = None
    node_class: str | None = None
    device_minutes: float | None = None
    uses_left: int | None = None


def node_token(node: str, node_class: str | None = None) -> NewToken:
    """Return the token for a node. No token of a person can have its name."""
    return NewToken(name=key_name(node), scope=Scope.WORKER, node=node, node_class=node_class)


def key_name(node: str) -> str:
    """Return the name of the token of `node`."""
    return f"{_KEY}{node}"


def node_of(name: str) -> str | None:
    """Return the node whose token has this name, None for a token of a person."""
    return name.removeprefix(_KEY) if name.startswith(_KEY) else None


def secret_digest(secret: str) -> str:
    """Return the stored form of a secret."""
    return digest_bytes(secret.encode("utf-8", "surrogateescape"))


def find(connection: Connection, digest: str) -> Row[Any] | None:
    """Return the token of a secret's digest, with `counts` (whether it is valid) and `left_s` until the secret ends.

    Also returns revoked tokens and replaced secrets, which do not count. `left_s` is None if the secret never ends.
    """
    is_valid = tokens.c.revoked_at.is_(None) & counts()
    query = select(tokens, (token_secrets.c.ends_at - db_now()).label("left_s"), is_valid.label("counts"))
    query = query.join(token_secrets, token_secrets.c.token_id == tokens.c.id)
    return connection.execute(query.where(token_secrets.c.digest == digest)).first()


def has_revoked_key(node: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the condition that all keys of the node of this name are revoked; an imported node never had one."""
    of_nodes = select(tokens.c.node).where(tokens.c.node.is_not(None))
    lives = of_nodes.where(tokens.c.revoked_at.is_(None))
    return node.in_(of_nodes) & node.not_in(lives)


def counts() -> ColumnElement[bool]:
    """Return the condition that a secret has not ended."""
    return or_(token_secrets.c.ends_at.is_(None), token_secrets.c.ends_at > db_now())


def create(connection: Connection, wanted: NewToken, *, by: str, lasts_s: float | None = None) -> str:
    """Store a token and return its secret, which cannot be read again and ends after `lasts_s`. Raises NameTaken."""
    secret = fresh_secret()
    store_key(connection, wanted, secret_digest(secret), by=by, lasts_s=lasts_s)
    return secret


def store_key(connection: Connection, wanted: NewToken, digest: str, *, by: str, lasts_s: float | None = None) -> None:
    """Store a token with the digest of a secret that somebody else made. Raises NameTaken."""
    _add_secret(connection, _insert(connection, wanted, by=by), digest, lasts_s=lasts_s)


def _insert(connection: Connection, wanted: NewToken, *, by: str) -> str:
    token_id = new_id("tok")
    values = {**vars(wanted), "scope": wanted.scope.value, "created_at": db_now(), "created_by": by}
    try:
        connection.execute(insert(tokens).values(id=token_id, **values))
    except IntegrityError as error:
        raise NameTaken(_taken(wanted.name)) from error
    return token_id


def _taken(name: str) -> str:
    node = node_of(name)
    if node is None:
        what, replace, end = f"there is a token '{name}'", f"tokens rotate {name}", f"tokens revoke {name}"
    else:
        what, replace, end = f"node '{node}' has a key", f"nodes rotate-key {node}", f"nodes revoke-key {node}"
    return f"{what} already; replace its secret (ablate {replace}), or end it first (ablate {end} --reason ...)"


def _add_secret(connection: Connection, token_id: str, digest: str, *, lasts_s: float | None = None) -> None:
    ends_at = None if lasts_s is None else db_now() + lasts_s
    values = {"digest": digest, "token_id": token_id, "created_at": db_now(), "ends_at": ends_at}
    connection.execute(insert(token_secrets).values(**values))


def rotate(connection: Connection, name: str, *, grace_s: float) -> str:
    """Return a new secret of a token; its older ones end after `grace_s`, and its share links now.

    Whoever had the old secret may have made the links. Raises NotFound, TokenOfSettings.
    """
    token = _changeable(connection, name)
    _end(connection, token.id, after_s=grace_s)
    _end_links(connection, token.id)
    secret = fresh_secret()
    _add_secret(connection, token.id, secret_digest(secret))
    return secret


def _end_links(connection: Connection, token_id: str) -> None:
    open_links = (share_links.c.token_id == token_id, share_links.c.revoked_at.is_(None))
    connection.execute(update(share_links).where(*open_links).values(revoked_at=db_now()))


def end_old_secrets(connection: Connection, name: str) -> None:
    """End every secret of a token except the newest, now. Raises NotFound, TokenOfSettings."""
    token = _changeable(connection, name)
    newest = select(func.max(token_secrets.c.created_at)).where(token_secrets.c.token_id == token.id)
    _end(connection, token.id, token_secrets.c.created_at < newest.scalar_subquery())


def revoke(connection: Connection, name: str, *, reason: str) -> None:
    """End a token. Its name becomes free, and its ablations keep its id. Raises NotFound, TokenOfSettings."""
    token = _changeable(connection, name)
    _end(connection, token.id)
    gone = {"revoked_at": db_now(), "reason": reason}
    connection.execute(update(tokens).where(tokens.c.id == token.id).values(**gone))


def set_quota(connection: Connection, name: str, device_minutes: float | None) -> None:
    """Limit the device minutes of all ablations of a token; None for no limit. Raises NotFound, Invalid."""
    if node_of(name) is not None:
        raise Invalid(f"'{name}' is the key of a node, which submits nothing; a quota limits tokens that submit")
    token = _changeable(connection, name)
    connection.execute(update(tokens).where(tokens.c.id == token.id).values(device_minutes=device_minutes))


def _end(connection: Connection, token_id: str, *which: ColumnElement[bool], after_s: float = 0.0) -> None:
    ends_at = db_now() + after_s
    later = or_(token_secrets.c.ends_at.is_(None), token_secrets.c.ends_at > ends_at)
    mine = token_secrets.c.token_id == token_id
    connection.execute(update(token_secrets).where(mine, later, *which).values(ends_at=ends_at))


def _changeable(connection: Connection, name: str) -> Row[Any]:
    token = _require(_live(connection, name, lock=True), name)
    if token.created_by == SETTINGS:
        variable = "ABLATE_WORKER_TOKEN" if token.scope == Scope.WORKER else "ABLATE_ADMIN_TOKEN"
        raise TokenOfSettings(f"the secret of '{name}' comes from the service's settings; change {variable} there")
    return token


def _live(connection: Connection, name: str, *, lock: bool = False) -> Row[Any] | None:
    query = select(tokens).where(tokens.c.name == name, tokens.c.revoked_at.is_(None))
    return connection.execute(query.with_for_update(key_share=True) if lock else query).first()


def _require(token: Row[Any] | None, name: str) -> Row[Any]:
    if token is None:
        node = node_of(name)
        none = f"there is no token {name!r}; ablate admin tokens list shows all"
        raise NotFound(none if node is None else f"node {node!r} has no key; it gets one by: ablate nodes add {node}")
    return token


def list_tokens(connection: Connection) -> list[Row[Any]]:
    """Return every token by name, including revoked ones."""
    return list(connection.execute(select(tokens).order_by(tokens.c.name, tokens.c.created_at)))


def get_token(connection: Connection, name: str) -> Row[Any]:
    """Return a token that is not revoked. Raises NotFound."""
    return _require(_live(connection, name), name)


def secrets_of(connection: Connection, token_ids: Sequence[str]) -> list[Row[Any]]:
    """Return (token id, created at, ends at) of every valid secret, oldest first."""
    query = select(token_secrets.c.token_id, token_secrets.c.created_at, token_secrets.c.ends_at)
    mine = token_secrets.c.token_id.in_(token_ids)
    return list(connection.execute(query.where(mine, counts()).order_by(token_secrets.c.created_at)))


def replace_settings_tokens(connection: Connection, wanted: Sequence[tuple[NewToken, str]]) -> None:
    """Make these the only tokens and secrets of the settings. Raises ConfigurationError."""
    current = [(_of_settings(connection, token), secret) for token, secret in wanted]
    ours = select(tokens.c.id).where(tokens.c.created_by == SETTINGS)
    kept = set(connection.execute(select(token_secrets.c.digest).where(token_secrets.c.token_id.in_(ours))).scalars())
    for token_id, secret in current:
        if secret_digest(secret) not in kept:
            _end_links(connection, token_id)
    connection.execute(delete(token_secrets).where(token_secrets.c.token_id.in_(ours)))
    unwanted = (tokens.c.created_by == SETTINGS) & tokens.c.id.not_in([token_id for token_id, _ in current])
    gone = {"revoked_at": db_now(), "reason": "no longer in the settings"}
    connection.execute(update(tokens).where(unwanted, tokens.c.revoked_at.is_(None)).values(**gone))
    for token_id, secret in current:
        try:
            _add_secret(connection, token_id, secret_digest(secret))
        except IntegrityError as error:
            raise ConfigurationError("a secret in the settings belongs to another token of this database") from error


def _of_settings(connection: Connection, wanted: NewToken) -> str:
    """Lock the token of this name from the settings, or create it; return its id."""
    token = _live(connection, wanted.name, lock=True)
    if token is None:
        return _insert(connection, wanted, by=SETTINGS)
    if token.created_by != SETTINGS:
        raise ConfigurationError(
            f"the settings have a secret for '{wanted.name}', but {token.created_by} created another one at "
            f"{token.created_at:.0f} s; revoke that one, or leave ABLATE_WORKER_TOKEN unset"
        )
    return str(token.id)


def check_owner(connection: Connection, principal: Principal, ablation_id: str) -> None:
    """Raise NotOwner unless the principal may change the ablation: operators any, others only their own.

    Raises NotFound.
    """
    query = select(ablations.c.token_id, ablations.c.submitted_by).where(ablations.c.id == ablation_id)
    row = connection.execute(query).first()
    if row is None:
        raise NotFound(f"there is no ablation {ablation_id!r}")
    if row.token_id != principal.token_id and not principal.scope.includes(Scope.OPERATE):
        raise NotOwner(
            f"ablation {ablation_id} was submitted by '{row.submitted_by}'; token '{principal.name}' may "
            "change only its own ablations, a token with scope 'operate' all"
        )
