"""A receipt on its way to people: with its block's signature, so that who stands behind it can be checked anywhere.

A node signs blocks, not receipts (docs/trust.md): the statement holds the digests of all receipts of the block, so
one receipt, these digests and the signature are enough.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from experiments.documents import Frozen, first_problem
from experiments.records.receipt_check import verify
from experiments.records.receipts import Receipt
from experiments.records.signing import Signature, block_statement, signature_problem


class BlockSignature(Frozen):
    """Who signed the block of a receipt, and what besides the receipt the statement takes."""

    node: str
    """Name of the node that ran the block."""
    receipts: tuple[str, ...]
    """Digests of the block's receipts, in running order."""
    by: Signature
    """Over the statement that a node makes about a block."""


class SignedReceipt(Receipt):
    """A receipt with its block's signature, which its digest does not cover."""

    signature: BlockSignature | None = None
    """None where nobody signed."""


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the receipt in `values` as it was sealed, and its block's signature as JSON; None where there is none."""
    return {name: value for name, value in values.items() if name != "signature"}, values.get("signature")


def verify_signed(values: Mapping[str, Any]) -> tuple[list[str], BlockSignature | None]:
    """Return what is wrong with a receipt read from JSON and with its signature, and the signature where it fits.

    Raises SigningUnavailable where there is a signature, and no library to check it.
    """
    receipt, given = split(values)
    problems = verify(receipt)
    if given is None or problems:
        return problems, None
    try:
        signature = BlockSignature.model_validate(given)
    except ValidationError as error:
        return [f"its signature is none: {first_problem(error)}"], None
    problem = _unfit(Receipt.model_validate(receipt), signature)
    return ([], signature) if problem is None else ([problem], None)


def _unfit(receipt: Receipt, signature: BlockSignature) -> str | None:
    """Return in what way a block's signature does not cover `receipt`."""
    ids, place = receipt.ids, receipt.ids.position
    if place >= len(signature.receipts) or signature.receipts[place] != receipt.digest:
        return f"its signature is over other receipts: {receipt.digest} is not the one at place {place + 1}"
    statement = block_statement(
        {"ablation": ids.ablation, "block": ids.block, "attempt": ids.attempt}, signature.receipts
    )
    problem = signature_problem(signature.by, statement)
    return None if problem is None else f"its signature {problem}"
