"""Signatures of nodes (Ed25519): signed statements, their verification, and the text form of keys.

A node signs each report to a service, and the manifest of each bundle that it writes. Both have the digests of all that
they contain, so nothing else is signed. A signature proves who made the statement and that it was not changed; it does
not prove that it is true (docs/trust.md). `cryptography` is imported on use: a node without it runs unsigned and
reports so.
"""

import base64
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from ablate.experiments.digest import canonical_json
from ablate.experiments.documents import Frozen
from ablate.experiments.errors import SigningUnavailable

KEY_PREFIX = "ed25519:"
KEY_PATTERN = r"^ed25519:[A-Za-z0-9_-]{42}[AEIMQUYcgkosw048]$"
"""The last character of 32 bytes carries four bits."""
_VALUE_PATTERN = r"^[A-Za-z0-9_-]{85}[AQgw]$"
_KEY_BYTES, _SIGNATURE_BYTES = 32, 64
_SAFE = b"-_"


def _decode(text: str, length: int) -> bytes:
    """Return the bytes of unpadded base64url. Raises ValueError unless `text` is their only spelling."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=_SAFE, validate=True)
    except ValueError as error:
        raise ValueError(f"{text[:100]!r} is not base64url: {error}") from error
    if len(data) != length or _encode(data) != text:
        raise ValueError(f"{text[:100]!r} is not {length} bytes as base64url without padding")
    return data


def _encode(data: bytes) -> str:
    return base64.b64encode(data, altchars=_SAFE).rstrip(b"=").decode()


def _checked_key(text: str) -> str:
    _decode(text.removeprefix(KEY_PREFIX), _KEY_BYTES)
    return text


def _checked_signature(text: str) -> str:
    _decode(text, _SIGNATURE_BYTES)
    return text


PublicKey = Annotated[str, Field(pattern=KEY_PATTERN), AfterValidator(_checked_key)]
"""A public key: "ed25519:" and its 32 bytes as base64url without padding."""


class Signature(Frozen):
    """A signature and its public key."""

    key: PublicKey
    value: Annotated[str, Field(pattern=_VALUE_PATTERN), AfterValidator(_checked_signature)]
    """64 bytes as base64url without padding."""


class Signer:
    """A private key; never leaves the node."""

    def __init__(self, seed: bytes) -> None:
        """Load the 32 bytes of a private key. Raises SigningUnavailable without the library."""
        self._private = _ed25519().Ed25519PrivateKey.from_private_bytes(seed)

    @cached_property
    def key(self) -> str:
        """The public key."""
        return KEY_PREFIX + _encode(self._private.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> Signature:
        """Return the signature of `message`; equal messages give equal signatures."""
        return Signature(key=self.key, value=_encode(self._private.sign(message)))


def signature_problem(signature: Signature, message: bytes) -> str | None:
    """Return why `signature` does not fit `message`; None when it fits. Raises SigningUnavailable."""
    public = _decode(signature.key.removeprefix(KEY_PREFIX), _KEY_BYTES)
    try:
        _ed25519().Ed25519PublicKey.from_public_bytes(public).verify(
            _decode(signature.value, _SIGNATURE_BYTES), message
        )
    except import_module("cryptography.exceptions").InvalidSignature:
        return f"does not fit key {signature.key}: the content was changed, or another key signed it"
    return None


def report_statement(ids: Mapping[str, str], receipts: Sequence[str], broke: Mapping[str, Any] | None = None) -> bytes:
    """Return the statement that a node signs about its report of a block to a service.

    `ids` has the ids of ablation, block and attempt, `receipts` the digests of the receipts in running order, and
    `broke` the reason when the attempt broke.
    """
    named = {name: ids[name] for name in ("ablation", "block", "attempt")}
    stated = {"kind": "ablate block", **named, "receipts": list(receipts), "broke": broke}
    return canonical_json(stated).encode()


def manifest_statement(digest: str) -> bytes:
    """Return the statement that a node signs about a bundle with this manifest digest."""
    return canonical_json({"kind": "ablate manifest", "digest": digest}).encode()


def signing_problem() -> str | None:
    """Return why this machine can neither sign nor check signatures; None when it can."""
    try:
        _ed25519()
    except SigningUnavailable as error:
        return str(error)
    return None


def _ed25519() -> Any:
    try:
        return import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
    except ImportError as error:
        raise SigningUnavailable(f"package cryptography cannot be imported: {error}") from error
