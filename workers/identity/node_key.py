"""The private key of this node: made on the first start, kept in one file that only its owner can read.

It is never sent anywhere and is no part of a bundle. Who can read the file can sign in the name of this node.
"""

import os
import secrets
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments.errors import SigningUnavailable
from experiments.records.signing import Signer, signing_problem
from workers.errors import NodeKeyError

KEY_FILE = Path("keys") / "node"
"""Below the state folder."""

_OTHERS = 0o077


def node_signer(path: Path) -> Signer:
    """Return the signer of the key in `path`; the key is made when there is none.

    Raises:
        SigningUnavailable: the library is missing.
        NodeKeyError: the file is no Ed25519 key, can be read by others, or cannot be written.

    """
    problem = signing_problem()
    if problem is not None:
        raise SigningUnavailable(problem)
    try:
        if not path.exists():
            _make(path)
        return Signer(_read(path))
    except OSError as error:
        raise NodeKeyError(f"the key of this node cannot be kept in {path}: {error}") from error


def _make(path: Path) -> None:
    """Write a fresh key whole, unless somebody else does so at the same moment: then theirs counts."""
    formats = _formats()
    pem = (
        _ed25519()
        .Ed25519PrivateKey.generate()
        .private_bytes(formats.Encoding.PEM, formats.PrivateFormat.PKCS8, formats.NoEncryption())
    )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(pem)
        os.link(fresh, path)
    except FileExistsError:
        pass
    finally:
        fresh.unlink()


def _read(path: Path) -> bytes:
    mode = path.stat().st_mode
    if mode & _OTHERS:
        raise NodeKeyError(f"{path} has mode {mode & 0o777:04o}: others can read this node's key; allowed: 0600")
    formats = _formats()
    try:
        private = formats.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise NodeKeyError(f"{path} is no private key as PEM: {error}") from error
    if not isinstance(private, _ed25519().Ed25519PrivateKey):
        raise NodeKeyError(f"{path} holds a {type(private).__name__}; expected an Ed25519 private key")
    return bytes(private.private_bytes_raw())


def _ed25519() -> Any:
    return import_module("cryptography.hazmat.primitives.asymmetric.ed25519")


def _formats() -> Any:
    return import_module("cryptography.hazmat.primitives.serialization")
