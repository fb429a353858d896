"""Signatures of blocks in the database, as one of their receipts carries them."""

from sqlalchemy import Connection, select

from experiments.records.signed_receipt import BlockSignature
from experiments.records.signing import Signature
from service.store.keys import imported_suffix
from service.store.tables import attempts, nodes, receipts, trials


def block_signature(connection: Connection, trial_id: str) -> BlockSignature | None:
    """Return the signature of the block in which the receipt of a trial was reported; None where nobody signed."""
    query = (
        select(attempts.c.id, attempts.c.signature, nodes.c.id.label("node_id"), nodes.c.name)
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
        by=Signature.model_validate_json(row.signature),
    )
