"""Keys of nodes: trusted and revoked ones, and the signers of an ablation's blocks."""

from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from ablate.experiments.outcomes import BlockState
from ablate.experiments.records.circumstances import BlockSigner
from ablate.experiments.records.messages import NodeRegistration
from ablate.experiments.records.receipt_check import BlockSignature
from ablate.experiments.records.signing import Signature
from ablate.service.errors import KeyRefused, NotFound
from ablate.service.store.tables import attempts, blocks, db_now, node_keys, nodes, receipts, trials


def block_signature(connection: Connection, trial_id: str) -> BlockSignature | None:
    """Return the signature of the report that contained a trial's receipt; None for an import: its bundle is."""
    query = (
        select(attempts.c.id, attempts.c.signed_by, attempts.c.signature, nodes.c.id.label("node_id"), nodes.c.name)
        .join(receipts, receipts.c.attempt_id == attempts.c.id)
        .join(nodes, nodes.c.id == attempts.c.node_id)
    )
    row = connection.execute(query.where(receipts.c.trial_id == trial_id)).first()
    if row is None or row.signature is None:
        return None
    digests = select(receipts.c.digest).join(trials, trials.c.id == receipts.c.trial_id)
    own = digests.where(receipts.c.attempt_id == row.id).order_by(trials.c.position)
    return BlockSignature(
        node=row.name.removesuffix(imported_suffix(row.node_id)),
        receipts=tuple(connection.execute(own).scalars()),
        by=Signature(key=row.signed_by, value=row.signature),
    )


BY_REGISTRATION = "first registration"


def admit(connection: Connection, node: str, key: str) -> None:
    """Let `node` register with `key`: its first key is trusted, another one only if an operator trusts it.

    Raises KeyRefused.
    """
    rows = list(connection.execute(select(node_keys).where((node_keys.c.key == key) | (node_keys.c.node == node))))
    for row in rows:
        if row.key == key and row.revoked_at is not None:
            raise KeyRefused(f"key {key} of node '{row.node}' was revoked: {row.reason}")
    own = {row.key for row in rows if row.node == node and row.revoked_at is None}
    if own and key not in own:
        raise KeyRefused(
            f"node '{node}' is known by key {', '.join(sorted(own))} and offers {key}; if it is the same machine with "
            f"a new key, an operator says so: ablate admin keys trust {key} --node {node}"
        )
    if not own:
        _insert(connection, node, key, by=BY_REGISTRATION)


def trust(connection: Connection, node: str, key: str, *, by: str) -> None:
    """Trust `key` for `node` from now on, even if it was revoked."""
    mine = (node_keys.c.key == key) & (node_keys.c.node == node)
    fresh = {"trusted_by": by, "trusted_at": db_now(), "revoked_at": None, "reason": None}
    if not connection.execute(update(node_keys).where(mine).values(**fresh)).rowcount:
        _insert(connection, node, key, by=by)


def replace(connection: Connection, node: str, key: str, *, by: str) -> None:
    """Trust `key` for `node`, and revoke its other keys."""
    others = (node_keys.c.node == node) & (node_keys.c.key != key) & node_keys.c.revoked_at.is_(None)
    ended = {"revoked_at": db_now(), "reason": f"replaced by {key}"}
    connection.execute(update(node_keys).where(others).values(**ended))
    trust(connection, node, key, by=by)


def revoke(connection: Connection, key: str, *, reason: str) -> None:
    """Accept no new signature of `key`; accepted receipts stay and still name it. Raises NotFound."""
    gone = {"revoked_at": db_now(), "reason": reason}
    if not connection.execute(update(node_keys).where(node_keys.c.key == key).values(**gone)).rowcount:
        raise NotFound(f"no node is known by key {key}")


def refusal(connection: Connection, node: str, key: str) -> str | None:
    """Return why `key` is not trusted as that of the node of this name; None if it is."""
    rows = list(connection.execute(select(node_keys).where(node_keys.c.key == key).order_by(node_keys.c.node)))
    if not rows:
        return "is not known here"
    if any(row.node == node and row.revoked_at is None for row in rows):
        return None
    others = [f"'{row.node}'" for row in rows if row.revoked_at is None]
    if others:
        return f"is trusted for node {' and '.join(others)}, not for '{node}'"
    return f"was revoked: {rows[0].reason}"


def list_keys(connection: Connection) -> list[Row[Any]]:
    """Return every key, including revoked ones."""
    return list(connection.execute(select(node_keys).order_by(node_keys.c.node, node_keys.c.trusted_at)))


def key_of_attempt(connection: Connection, attempt_id: str) -> tuple[str, str | None]:
    """Return the name of an attempt's node, and the key that it registered with."""
    query = select(nodes.c.name, nodes.c.registration).join(attempts, attempts.c.node_id == nodes.c.id)
    row = connection.execute(query.where(attempts.c.id == attempt_id)).one()
    return row.name, NodeRegistration.model_validate_json(row.registration).public_key


def store_signature(connection: Connection, attempt_id: str, signature: Signature) -> None:
    """Store the node's signature of a report."""
    mine = update(attempts).where(attempts.c.id == attempt_id)
    connection.execute(mine.values(signed_by=signature.key, signature=signature.value))


def signers(connection: Connection, ablation_id: str) -> tuple[BlockSigner, ...]:
    """Return the nodes that signed for the finished blocks of an ablation."""
    query = (
        select(nodes.c.id, nodes.c.name, attempts.c.signed_by, blocks.c["index"])
        .join(attempts, attempts.c.id == blocks.c.attempt_id)
        .join(nodes, nodes.c.id == attempts.c.node_id)
        .where(blocks.c.ablation_id == ablation_id, blocks.c.state == BlockState.DONE)
        .order_by(blocks.c["index"])
    )
    signed: dict[tuple[str, str, str | None], list[int]] = {}
    for node, name, key, index in connection.execute(query):
        signed.setdefault((node, name.removesuffix(imported_suffix(node)), key), []).append(index)
    return tuple(
        BlockSigner(node=node, name=name, key=key, blocks=tuple(own)) for (node, name, key), own in signed.items()
    )


def imported_suffix(node_id: str) -> str:
    """Return the suffix of an imported node's stored name, because names of offline machines are not unique."""
    return f" ({node_id})"


def _insert(connection: Connection, node: str, key: str, *, by: str) -> None:
    connection.execute(insert(node_keys).values(key=key, node=node, trusted_by=by, trusted_at=db_now()))
