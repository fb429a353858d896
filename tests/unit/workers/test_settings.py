from pathlib import Path

import pytest
from pydantic import ValidationError

from kernels.backends import NODE_CLASSES
from workers.environment_variables import PEER_SITE, peer_site, quiet_s
from workers.errors import SettingsError
from workers.settings import PLACEHOLDERS, Settings


@pytest.mark.parametrize("token", [*sorted(PLACEHOLDERS), "ChangeMe", ""])
def test_settings_reject_a_placeholder_token(token: str) -> None:
    with pytest.raises((SettingsError, ValidationError), match="worker key"):
        Settings(worker_token=token)


def test_read_token_from_its_file(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    assert settings.read_token() is None
    settings.token_file.parent.mkdir()
    settings.token_file.write_text("changeme\n")
    with pytest.raises(SettingsError, match="placeholder 'changeme'"):
        settings.read_token()
    settings.token_file.write_text("abl_wrk_1234567890\n")
    assert settings.read_token() == "abl_wrk_1234567890"


def test_settings_derived_paths_are_absolute(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    assert settings.data_path == tmp_path / "data"
    assert settings.broker == f"redis+socket://{tmp_path}/run/valkey.sock"


@pytest.mark.parametrize("text", ["x", "-1", "301", "nan", "inf"])
def test_a_wait_for_quiet_is_zero_to_three_hundred_seconds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ABLATE_QUIET_S", text)
    with pytest.raises(ValueError, match=f"ABLATE_QUIET_S is '{text}'; allowed: 0 to 300 seconds"):
        quiet_s(60.0)
    with pytest.raises(ValidationError):
        Settings()
    monkeypatch.setenv("ABLATE_QUIET_S", "300")
    assert quiet_s(60.0) == Settings().quiet_s == 300.0
    monkeypatch.delenv("ABLATE_QUIET_S")
    assert quiet_s(60.0) == Settings().quiet_s == 60.0


def test_settings_unknown_node_class_lists_allowed() -> None:
    with pytest.raises(ValidationError, match=f"'cpuu' is unknown; allowed: {', '.join(NODE_CLASSES)}"):
        Settings(node_class="cpuu")


def test_settings_corpus_dirs_are_absolute_folders(tmp_path: Path) -> None:
    assert Settings().corpus_roots == ()
    assert Settings(corpus_dirs=f"/srv/text:{tmp_path}:").corpus_roots == (Path("/srv/text"), tmp_path)
    with pytest.raises(ValidationError, match="names 'text'; allowed: absolute folders"):
        Settings(corpus_dirs="/srv/text:text")


def test_peer_site_is_the_operators_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(PEER_SITE, raising=False)
    assert peer_site() is None
    monkeypatch.setenv(PEER_SITE, str(tmp_path))
    assert peer_site() == tmp_path
