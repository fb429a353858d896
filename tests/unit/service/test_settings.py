import json
from pathlib import Path

import pytest

from ablate.experiments.errors import BadSetting
from ablate.experiments.system.http_clients import HomeStack, home_stack
from ablate.service.client.settings import ClientSettings
from ablate.service.errors import ConfigurationError
from ablate.service.settings import ServiceSettings, generated_secret
from ablate.workers.isolation import environment
from ablate.workers.settings import Settings

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


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "api.example.org"])  # noqa: S104  # refused below
def test_check_address_refuses_an_open_address_without_a_gateway(host: str) -> None:
    with pytest.raises(ConfigurationError, match="ABLATE_GATEWAY=true"):
        ServiceSettings(host=host).check_address()
    ServiceSettings(host=host, gateway=True).check_address()
    ServiceSettings(host="127.0.0.1").check_address()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_checked_secret_may_be_absent_on_loopback(host: str) -> None:
    assert ServiceSettings(host=host).checked_secret("admin") is None


def test_client_reads_the_embedded_stack(tmp_path: Path) -> None:
    assert home_stack(tmp_path) is None
    assert ClientSettings(home=tmp_path).token_for("http://127.0.0.1:8321", is_own=True) is None
    (tmp_path / "stack.json").write_text(json.dumps({"stack_id": "one", "api_url": "http://10.0.0.5:9000/"}))
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "admin").write_text("generated\r\n")
    assert home_stack(tmp_path) == HomeStack(stack_id="one", api_url="http://10.0.0.5:9000")
    assert ClientSettings(home=tmp_path).token_for("http://10.0.0.5:9000", is_own=True) == "generated"
    assert ClientSettings(home=tmp_path).token_for("http://10.0.0.5:9000", is_own=False) is None
    named = ClientSettings(home=tmp_path, url=" https://api.example.org/ ", token=" mine\r")  # type: ignore[arg-type]
    assert (named.url, named.token_for(named.url, is_own=False)) == ("https://api.example.org", "mine")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"stack_id": 1, "api_url": "nowhere"}'])
def test_a_damaged_state_of_the_stack_is_an_error_that_names_it(content: str, tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text(content)
    with pytest.raises(BadSetting, match=r"stack.json cannot be read: it is damaged; remove it, then run: ablate up"):
        home_stack(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff\x00 garbage" * 9, b"two words of enough characters", b"\n" * 40]
)
def test_a_file_without_a_secret_is_refused_and_stays(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokens" / "admin"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"tokens/admin contains no secret; run ablate down, remove the file"):
        generated_secret(path)
    assert path.read_bytes() == content
    path.unlink()
    secret = generated_secret(path)
    path.write_text(f" {secret}\r\n")
    assert generated_secret(path) == secret
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigurationError, match=r"tokens/admin can neither be read nor made: .*Is a directory"):
        generated_secret(path)


def test_every_setting_with_a_secret_or_an_address_is_hidden_from_trials() -> None:
    for model in (ServiceSettings, ClientSettings, Settings):
        for name, field in model.model_fields.items():
            if "SecretStr" in str(field.annotation) or name.endswith("url"):
                assert environment._SECRETS.fullmatch(f"ABLATE_{name.upper()}"), name
