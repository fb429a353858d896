from pathlib import Path

import pytest

from kernels.backends import Lane
from kernels.mamba3_mimo import peer
from workers import trial
from workers.inherited import PEER_SITE, peer_site


def test_peer_site_is_what_the_operator_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(PEER_SITE, raising=False)
    assert peer_site() is None
    monkeypatch.setenv(PEER_SITE, str(tmp_path))
    assert peer_site() == tmp_path


@pytest.mark.parametrize(("lane", "used"), [(Lane.PEER, True), (Lane.CUDA, False), (Lane.REFERENCE, False)])
def test_only_trials_of_lane_peer_use_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lane: Lane, used: bool
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(peer, "use_site", asked.append)
    monkeypatch.setenv(PEER_SITE, str(tmp_path))
    trial._find_lane(lane)
    assert asked == ([tmp_path] if used else [])


def test_without_a_folder_the_lane_itself_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PEER_SITE, raising=False)
    trial._find_lane(Lane.PEER)
    assert "ABLATE_PEER_SITE" in str(peer.missing())
