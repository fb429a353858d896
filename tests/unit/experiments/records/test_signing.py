import importlib
from typing import Any

import pytest
from pydantic import ValidationError

from ablate.experiments.errors import SigningUnavailable
from ablate.experiments.records import signing
from ablate.experiments.records.messages import NodeRegistration
from ablate.experiments.records.signing import (
    KEY_PREFIX,
    Signature,
    Signer,
    manifest_statement,
    report_statement,
    signature_problem,
    signing_problem,
)

RFC_8032 = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
]
"""Private key, public key, message and signature: tests 1 and 2 of RFC 8032, section 7.1."""

ONE, OTHER = Signer(b"1" * 32), Signer(b"2" * 32)
IDS = {"ablation": "abl_1", "block": "blk_1", "attempt": "att_1"}


@pytest.mark.parametrize(("seed", "key", "message", "value"), RFC_8032)
def test_signatures_are_those_of_the_standard(seed: str, key: str, message: str, value: str) -> None:
    signer = Signer(bytes.fromhex(seed))
    signature = signer.sign(bytes.fromhex(message))
    assert signer.key == KEY_PREFIX + signing._encode(bytes.fromhex(key))
    assert signature.value == signing._encode(bytes.fromhex(value))
    assert signature_problem(signature, bytes.fromhex(message)) is None


def test_signature_fits_one_message_and_one_key() -> None:
    signature = ONE.sign(b"a")
    assert signature_problem(signature, b"a") is None
    assert "does not fit key" in str(signature_problem(signature, b"b"))
    assert "does not fit key" in str(signature_problem(signature.model_copy(update={"key": OTHER.key}), b"a"))


def test_every_changed_bit_of_a_signature_is_found() -> None:
    message = b"block"
    raw = signing._decode(ONE.sign(message).value, 64)
    for bit in range(512):
        changed = bytes(byte ^ (1 << bit % 8 if place == bit // 8 else 0) for place, byte in enumerate(raw))
        assert signature_problem(Signature(key=ONE.key, value=signing._encode(changed)), message)


@pytest.mark.parametrize(
    "key",
    ["", "ed25519:", ONE.key[:-1], ONE.key + "A", ONE.key.upper(), "rsa:" + ONE.key[8:], ONE.key[:-1] + "+", "é" * 51],
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ValidationError):
        Signature(key=key, value=ONE.sign(b"").value)
    with pytest.raises(ValidationError):
        NodeRegistration(node_class="cpu", devices=(), versions={}, code_digest="", public_key=key)


def test_a_key_has_one_spelling() -> None:
    last = ONE.key[-1]
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    same_bytes = alphabet[alphabet.index(last) ^ 1]
    with pytest.raises(ValidationError, match="String should match pattern"):
        Signature(key=ONE.key[:-1] + same_bytes, value=ONE.sign(b"").value)


def test_statements_differ_by_everything_that_is_in_them() -> None:
    base = report_statement(IDS, ["sha256:a", "sha256:b"])
    others = [
        *(report_statement({**IDS, name: "x"}, ["sha256:a", "sha256:b"]) for name in IDS),
        report_statement(IDS, ["sha256:b", "sha256:a"]),
        report_statement(IDS, ["sha256:a"]),
        report_statement(IDS, ["sha256:a", "sha256:b"], {"failure_class": "timeout"}),
        manifest_statement("sha256:a"),
    ]
    assert len({base, *others}) == len(others) + 1


def test_missing_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(name: str, *rest: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError("No module named '_cffi_backend'")
        return importlib.import_module(name, *rest)

    assert signing_problem() is None
    monkeypatch.setattr(signing, "import_module", lost)
    assert "package cryptography cannot be imported: No module named '_cffi_backend'" in str(signing_problem())
    with pytest.raises(SigningUnavailable):
        Signer(b"1" * 32)
