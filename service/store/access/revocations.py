"""Revocations across a restore: a backup knows nothing of the keys that ended after it was made.

`python -m ablate.service.store.access.revocations save FILE` writes what has ended and what counts, before the restore.
`apply FILE` ends in the restored database what had ended. `-` is the standard stream. `ablate admin restore` does both.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from sqlalchemy import Connection, Row, delete, inspect, select, update
from sqlalchemy.exc import SQLAlchemyError

from ablate.experiments.documents import Frozen, write_whole
from ablate.service.errors import ConfigurationError
from ablate.service.settings import get_settings
from ablate.service.store.session import Store
from ablate.service.store.tables import node_keys, share_links, token_secrets, tokens

_STANDARD = Path("-")
"""The file that means standard output, and standard input."""


class _Gone(Frozen):
    at: float
    reason: str | None


class Revocations(Frozen):
    """What ended in a database, and what counts in it. There is no secret in it, only digests."""

    tokens: dict[str, _Gone | None]
    """By id of every token: when and why it was revoked; None if it was not."""
    secrets: dict[str, float | None]
    """Digests of all stored secrets, and when they end."""
    keys: dict[str, _Gone | None]
    """By "key node" of every signing key, as for tokens."""
    links: dict[str, float | None] = Field(default={})
    """By id of every share link: when it was revoked."""


def read(connection: Connection) -> Revocations:
    """Return what has ended in a database of any revision that this version upgrades."""
    own = select(tokens.c.id, tokens.c.revoked_at, tokens.c.reason)
    signing = select(node_keys.c.key, node_keys.c.node, node_keys.c.revoked_at, node_keys.c.reason)
    return Revocations(
        tokens={row.id: _gone(row.revoked_at, row.reason) for row in connection.execute(own)},
        secrets={
            row.digest: row.ends_at
            for row in connection.execute(select(token_secrets.c.digest, token_secrets.c.ends_at))
        },
        keys={f"{row.key} {row.node}": _gone(row.revoked_at, row.reason) for row in connection.execute(signing)},
        links={row.id: row.revoked_at for row in _links(connection)},
    )


def _links(connection: Connection) -> list[Row[Any]]:
    """Return the share links; databases before revision 0021 have none."""
    if not inspect(connection).has_table(share_links.name):
        return []
    columns = (share_links.c.id, share_links.c.ablation_id, share_links.c.revoked_at)
    return list(connection.execute(select(*columns)))


def _gone(at: float | None, reason: str | None) -> _Gone | None:
    return None if at is None else _Gone(at=at, reason=reason)


def revived(connection: Connection, before: Revocations, *, end: bool) -> list[str]:
    """Return what counts in a restored database and had ended `before`, for people; `end` it again.

    Tokens and keys that the database before did not know are left as they are.
    """
    lines = [*_tokens(connection, before, end=end), *_keys(connection, before, end=end)]
    for row in _links(connection):
        revoked_at = before.links.get(row.id)
        if revoked_at is not None and row.revoked_at is None:
            lines.append(f"share link {row.id} of {row.ablation_id}, revoked")
            if end:
                connection.execute(update(share_links).where(share_links.c.id == row.id).values(revoked_at=revoked_at))
    return lines


def _tokens(connection: Connection, before: Revocations, *, end: bool) -> Iterator[str]:
    rows = list(connection.execute(select(tokens.c.id, tokens.c.name, tokens.c.revoked_at)))
    for row in rows:
        gone = before.tokens.get(row.id)
        if gone is not None and row.revoked_at is None:
            yield f"token {row.name}, revoked: {gone.reason}"
            if end:
                connection.execute(
                    update(tokens).where(tokens.c.id == row.id).values(revoked_at=gone.at, reason=gone.reason)
                )
    names = {row.id: row.name for row in rows if row.id in before.tokens}
    for row in list(connection.execute(select(token_secrets))):
        is_revoked = before.tokens.get(row.token_id) is not None
        ends_at = before.secrets.get(row.digest)
        if row.token_id not in names or (row.digest in before.secrets and ends_at == row.ends_at):
            continue
        if not is_revoked:
            yield f"a secret of token {names[row.token_id]}, replaced"
        if end:
            mine = token_secrets.c.digest == row.digest
            if ends_at is None:  # the database before had dropped it
                connection.execute(delete(token_secrets).where(mine))
            else:
                connection.execute(update(token_secrets).where(mine).values(ends_at=ends_at))


def _keys(connection: Connection, before: Revocations, *, end: bool) -> Iterator[str]:
    for row in list(connection.execute(select(node_keys).where(node_keys.c.revoked_at.is_(None)))):
        gone = before.keys.get(f"{row.key} {row.node}")
        if gone is None:
            continue
        yield f"signing key of node {row.node}, revoked: {gone.reason}"
        if end:
            mine = (node_keys.c.key == row.key, node_keys.c.node == row.node)
            connection.execute(update(node_keys).where(*mine).values(revoked_at=gone.at, reason=gone.reason))


def main(arguments: list[str]) -> int:
    """Save or apply; return 64 for other arguments, and 1 if it is not possible."""
    if len(arguments) != 2 or arguments[0] not in ("save", "apply"):  # a verb and a file
        sys.stderr.write("usage: python -m ablate.service.store.access.revocations save|apply FILE\n")
        return 64
    verb, file = arguments[0], Path(arguments[1])
    try:
        store = Store(get_settings().sqlalchemy_url)
        try:
            lines = _save(store, file) if verb == "save" else _apply(store, file)
        finally:
            store.close()
    except (ConfigurationError, SQLAlchemyError, OSError, ValidationError) as error:
        sys.stderr.write(f"cannot {verb} the revocations: {error}\n")
        return 1
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _save(store: Store, file: Path) -> list[str]:
    with store.read() as connection:
        current = read(connection)
    text = current.model_dump_json(indent=1) + "\n"
    if file == _STANDARD:
        return [text.rstrip("\n")]
    write_whole(file, text, mode=0o600)
    return [f"{file}: {len(current.tokens)} tokens, {len(current.keys)} signing keys"]


def _apply(store: Store, file: Path) -> list[str]:
    content = sys.stdin.buffer.read() if file == _STANDARD else file.read_bytes()
    before = Revocations.model_validate_json(content)
    with store.write() as connection:
        ended = revived(connection, before, end=True)
    return [f"ended again: {line}" for line in ended] or ["nothing had ended since the backup"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
