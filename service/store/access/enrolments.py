"""Enrolment tokens: with one, workers that a cluster starts get keys of nodes of one class, until it ends.

They are tokens of scope `enrol`, with a number of uses and an end. Each use stores the key of a new node.
"""

import secrets

from sqlalchemy import Connection, update

from ablate.service.errors import EnrolmentRefused, NameTaken
from ablate.service.principals import Principal, Scope
from ablate.service.store.access import tokens
from ablate.service.store.tables import tokens as token_table

_PREFIX = "enrol/"
_OTHER = "an operator makes another: ablate nodes enrol {}"


def create(connection: Connection, node_class: str, *, uses: int, lasts_s: float, by: str) -> tuple[str, str]:
    """Store an enrolment token; return its name and its secret, which cannot be read again."""
    name = f"{_PREFIX}{node_class}-{secrets.token_hex(3)}"
    wanted = tokens.NewToken(name=name, scope=Scope.ENROL, node_class=node_class, uses_left=uses)
    return name, tokens.create(connection, wanted, by=by, lasts_s=lasts_s)


def enrol(connection: Connection, principal: Principal, node: str, node_class: str, key_digest: str) -> None:
    """Store the digest of a key that a worker made for `node`, and count one use; a repetition changes nothing.

    Raises EnrolmentRefused for another class and a token without uses, NameTaken if the node has another key.
    """
    if node_class != principal.node_class:
        raise EnrolmentRefused(
            f"this enrolment token is for class '{principal.node_class}', and the worker is of class '{node_class}'; "
            + _OTHER.format(node_class)
        )
    if _is_repeated(connection, node, key_digest):
        return
    own = (token_table.c.id == principal.token_id, token_table.c.revoked_at.is_(None), token_table.c.uses_left > 0)
    if not connection.execute(update(token_table).where(*own).values(uses_left=token_table.c.uses_left - 1)).rowcount:
        raise EnrolmentRefused("every use of this enrolment token is used up; " + _OTHER.format(node_class))
    tokens.store_key(connection, tokens.node_token(node, node_class), key_digest, by=principal.name)


def _is_repeated(connection: Connection, node: str, key_digest: str) -> bool:
    """Return whether this key is that of the node. Raises NameTaken for a key of anybody else."""
    row = tokens.find(connection, key_digest)
    if row is None:
        return False
    if row.node == node and row.counts:
        return True
    raise NameTaken("this key was used before; make another")


def revoke(connection: Connection, name: str, *, reason: str) -> None:
    """End an enrolment token; nodes that enrolled with it stay. Raises NotFound."""
    tokens.revoke(connection, f"{_PREFIX}{name.removeprefix(_PREFIX)}", reason=reason)
