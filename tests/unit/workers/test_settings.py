from pathlib import Path

import pytest
from pydantic import ValidationError

from kernels.backends import NODE_CLASSES
from workers.errors import SettingsError
from workers.settings import PLACEHOLDERS, Settings


@pytest.mark.parametrize("token", [*sorted(PLACEHOLDERS), "ChangeMe", ""])
def test_settings_placeholder_token_refused(token: str) -> None:
    with pytest.raises((SettingsError, ValidationError), match="worker key"):
        Settings(worker_token=token)


def test_read_token_placeholder_in_file_refused(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "worker").write_text("changeme\n")
    with pytest.raises(SettingsError, match="placeholder 'changeme'"):
        Settings(home=tmp_path).read_token()


def test_read_token_absent_file_is_none(tmp_path: Path) -> None:
    assert Settings(home=tmp_path).read_token() is None


def test_read_token_from_file_strips_newline(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "worker").write_text("abl_wrk_1234567890\n")
    assert Settings(home=tmp_path).read_token() == "abl_wrk_1234567890"


def test_settings_derived_paths_are_absolute(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    assert settings.data_path == tmp_path / "data"
    assert settings.broker == f"redis+socket://{tmp_path}/run/valkey.sock"


def test_settings_unknown_node_class_lists_allowed() -> None:
    with pytest.raises(ValidationError, match=f"'cpuu' is unknown; allowed: {', '.join(NODE_CLASSES)}"):
        Settings(node_class="cpuu")


def test_settings_corpus_dirs_are_absolute_folders(tmp_path: Path) -> None:
    assert Settings().corpus_roots == ()
    assert Settings(corpus_dirs=f"/srv/text:{tmp_path}:").corpus_roots == (Path("/srv/text"), tmp_path)
    with pytest.raises(ValidationError, match="names 'text'; allowed: absolute folders"):
        Settings(corpus_dirs="/srv/text:text")
