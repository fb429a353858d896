import math
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from ablate.kernels.backends import NODE_CLASSES
from ablate.workers.environment_variables import PEER_SITE, peer_site, python_environments, quiet_s, secrets_file
from ablate.workers.errors import SettingsError
from ablate.workers.settings import PLACEHOLDERS, Settings


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


@pytest.mark.parametrize(
    ("text", "least_s", "most_s"),
    [("8h", 8 * 3600 - 60, 8 * 3600), ("90m", 5340, 5400), ("2026-01-01T00:00Z", -1e12, 0)],
)
def test_a_worker_stays_until_a_duration_is_over_or_a_time_has_come(text: str, least_s: float, most_s: float) -> None:
    assert least_s < Settings(until=text).lasts_s <= most_s
    assert Settings().lasts_s == math.inf


def test_a_time_without_a_zone_is_one_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC-3")  # three hours ahead, in the words of POSIX
    time.tzset()
    try:
        local, universal = (Settings(until=text).until for text in ("2099-01-01T15:00", "2099-01-01T12:00+00:00"))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert local == universal


@pytest.mark.parametrize("text", ["", "soon", "25h", "8", "-1h", "0m", "2026-13-01", "nan", "0001-01-01T00:00", " 8h"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="allowed: a time such as"):
        Settings(until=text)


@pytest.mark.parametrize("values", [{"exit_when_idle": "600"}, {"exit_when_idle": ""}, {"max_blocks": "0"}])
def test_limits_of_a_stay_need_a_unit_and_are_positive(values: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        Settings(**values)
    assert Settings(exit_when_idle="10m").exit_when_idle == 600


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


def test_environments_may_lie_below_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tmp_path.joinpath("envs/lab/bin").mkdir(parents=True)
    tmp_path.joinpath("envs/lab/bin/python").touch()
    tmp_path.joinpath("link").symlink_to(tmp_path / "envs")
    text = "lab=~/envs/lab, linked=~/link/lab"
    own = {"lab": tmp_path / "envs/lab", "linked": tmp_path / "link/lab"}
    assert Settings(environments=text).python_environments == python_environments(text) == own
    with pytest.raises(ValidationError, match="'~/none', which has no bin/python"):
        Settings(environments="lab=~/none")
    for bad in ("lab=envs/lab", "lab", "lab=~nobody-of-this-name/lab"):
        with pytest.raises(ValidationError, match="with an absolute folder, or one below ~"):
            Settings(environments=bad)


def test_the_file_of_secrets_is_the_named_one_or_that_of_the_state_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ABLATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("ABLATE_SECRETS", raising=False)
    assert Settings().secrets_path is secrets_file() is None
    tmp_path.joinpath("state").mkdir()
    tmp_path.joinpath("state/secrets").touch()
    assert Settings().secrets_path == secrets_file() == tmp_path / "state/secrets"
    monkeypatch.setenv("ABLATE_SECRETS", "~/keys")
    assert Settings().secrets_path == secrets_file() == tmp_path / "keys"
