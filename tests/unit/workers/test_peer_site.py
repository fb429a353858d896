from pathlib import Path

import pytest

from workers.environment_variables import PEER_SITE, peer_site


def test_peer_site_is_what_the_operator_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(PEER_SITE, raising=False)
    assert peer_site() is None
    monkeypatch.setenv(PEER_SITE, str(tmp_path))
    assert peer_site() == tmp_path
