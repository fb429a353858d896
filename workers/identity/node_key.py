"""The private key of this node, created at the first start in a file that only its owner can read.

The key never leaves this machine and is no part of a bundle. Anybody who can read the file can sign as this node.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from ablate.experiments.documents import write_whole
from ablate.experiments.errors import SigningUnavailable
from ablate.experiments.records.signing import Signer, signing_problem
from ablate.workers.errors import NodeKeyError

KEY_FILE = Path("keys") / "node"
"""Below the state folder."""

_OTHERS = 0o077
_REMEDY = "restore it from a copy, or remove it to sign with a new key, which an operator must trust (docs/trust.md)"


def node_signer(path: Path) -> Signer:
    """Return the signer with the key in `path`, which is created if it does not exist.

    Raises:
        SigningUnavailable: the library is missing.
        NodeKeyError: the file is no Ed25519 key, is readable for others, or cannot be written.

    """
    problem = signing_problem()
    if problem is not None:
        raise SigningUnavailable(problem)
    try:
        if not path.exists():
            _create(path)
        return Signer(_read(path))
    except OSError as error:
        raise NodeKeyError(f"the key of this node cannot be read or written in {path}: {error}") from error


def _create(path: Path) -> None:
    """Write a new key whole. If another process writes one at the same time, the first counts."""
    formats = _formats()
    pem = (
        _ed25519()
        .Ed25519PrivateKey.generate()
        .private_bytes(formats.Encoding.PEM, formats.PrivateFormat.PKCS8, formats.NoEncryption())
    )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(path, pem.decode(), mode=0o600, replace=False)


def _read(path: Path) -> bytes:
    mode = path.stat().st_mode
    if mode & _OTHERS:
        raise NodeKeyError(f"{path} has mode {mode & 0o777:04o}: others can read this node's key; allowed: 0600")
    formats = _formats()
    try:
        private = formats.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise NodeKeyError(f"{path} is no private key in PEM format ({error}); {_REMEDY}") from error
    if not isinstance(private, _ed25519().Ed25519PrivateKey):
        raise NodeKeyError(f"{path} contains a {type(private).__name__}; expected an Ed25519 private key; {_REMEDY}")
    return bytes(private.private_bytes_raw())


def _ed25519() -> Any:
    return import_module("cryptography.hazmat.primitives.asymmetric.ed25519")


def _formats() -> Any:
    return import_module("cryptography.hazmat.primitives.serialization")
