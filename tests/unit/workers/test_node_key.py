import stat
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from ablate.experiments.errors import SigningUnavailable
from ablate.workers import node
from ablate.workers.errors import NodeKeyError
from ablate.workers.node import KEY_FILE, node_signer


def test_key_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / KEY_FILE
    key = node_signer(path).key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert node_signer(path).key == key
    assert list(path.parent.iterdir()) == [path]
    assert node_signer(tmp_path / "other").key != key


def test_workers_that_start_at_once_share_one_key(tmp_path: Path) -> None:
    keys: list[str] = []
    threads = [threading.Thread(target=lambda: keys.append(node_signer(tmp_path / KEY_FILE).key)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len(set(keys)) == 1
    assert [path.name for path in (tmp_path / KEY_FILE).parent.iterdir()] == [KEY_FILE.name]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    node_signer(path)
    path.chmod(mode)
    with pytest.raises(NodeKeyError, match=f"mode {mode:04o}: others can read .* allowed: 0600"):
        node_signer(path)


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    node_signer(path)
    for content in (b"", b"\xff\x00", path.read_bytes()[:60]):
        path.write_bytes(content)
        with pytest.raises(NodeKeyError, match="is no private key in PEM format"):
            node_signer(path)
    path.write_bytes(X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(NodeKeyError, match="expected an Ed25519 private key"):
        node_signer(path)


def test_place_that_cannot_hold_a_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NodeKeyError, match="cannot be read or written in"):
        node_signer(tmp_path / "file" / "key")


def test_missing_library_is_said_and_makes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "signing_problem", lambda: "package cryptography cannot be imported")
    with pytest.raises(SigningUnavailable, match="cannot be imported"):
        node_signer(tmp_path / KEY_FILE)
    assert list(tmp_path.iterdir()) == []
