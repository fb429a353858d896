import json
from pathlib import Path

import pytest

from service.client.settings import ClientSettings
from service.errors import ConfigurationError
from service.settings import ServiceSettings

GOOD = "0123456789abcdef0123"


def test_defaults_live_below_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ABLATE_HOME", str(tmp_path))
    settings = ServiceSettings()
    assert settings.sqlalchemy_url == f"sqlite:///{tmp_path}/ablate.db"
    assert settings.celery_url == f"redis+socket://{tmp_path}/run/valkey.sock"
    assert settings.is_loopback


def test_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ABLATE_DATABASE_URL", "postgresql+psycopg://db/ablate")
    monkeypatch.setenv("ABLATE_LEASE_S", "7.5")
    assert ServiceSettings().sqlalchemy_url == "postgresql+psycopg://db/ablate"
    assert ServiceSettings().lease_s == 7.5


@pytest.mark.parametrize("value", ["changeme", "ChangeMe", "short", "", "admin"])
def test_checked_secret_refuses_placeholders(value: str) -> None:
    with pytest.raises(ConfigurationError, match="ABLATE_ADMIN_TOKEN is a placeholder or too short"):
        ServiceSettings(admin_token=value).checked_secret("admin")  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "api.example.org"])  # noqa: S104  # refused below
def test_checked_secret_refuses_an_open_address_without_an_administrator(host: str) -> None:
    settings = ServiceSettings(host=host, worker_token=GOOD)  # type: ignore[arg-type]
    assert settings.checked_secret("worker") == GOOD
    with pytest.raises(ConfigurationError, match="ABLATE_ADMIN_TOKEN is not set"):
        settings.checked_secret("admin")
    assert ServiceSettings(host=host).checked_secret("worker") is None, "nodes get keys of their own"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_checked_secret_may_be_absent_on_loopback(host: str) -> None:
    assert ServiceSettings(host=host).checked_secret("admin") is None


def test_client_reads_the_embedded_stack(tmp_path: Path) -> None:
    assert ClientSettings(home=tmp_path).api_url == "http://127.0.0.1:8321"
    assert ClientSettings(home=tmp_path).bearer_token is None
    (tmp_path / "stack.json").write_text(json.dumps({"api_url": "http://127.0.0.1:9000/"}))
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "admin").write_text("generated\n")
    assert ClientSettings(home=tmp_path).api_url == "http://127.0.0.1:9000"
    assert ClientSettings(home=tmp_path).bearer_token == "generated"
    named = ClientSettings(home=tmp_path, url="https://api.example.org/", token="mine")  # type: ignore[arg-type]
    assert (named.api_url, named.bearer_token) == ("https://api.example.org", "mine")
