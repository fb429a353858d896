"""Every client by the same rules: proxies, authorities, redirects, reasons, and who gets a token."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509

from ablate.experiments.errors import BadSetting
from ablate.experiments.reporting.mlflow.sink import Sink
from ablate.experiments.system.http_clients import AUTHORITIES, HomeStack, http_client, proxy_of
from ablate.service.background.webhooks import Webhook
from ablate.service.client.api import Client, Unreachable
from ablate.service.client.settings import get_client_settings
from ablate.service.http import readiness
from ablate.service.stack.supervisor import prepare_experiment
from ablate.workers.leases.service_api import ServiceApi, service_api
from ablate.workers.settings import Settings
from tests import certificates
from tests.ports import free_port
from tests.waiting import until
from tests.web_servers import WebServer, serving

TOKEN = "planted-token-of-the-tests-51c7"
VIEW = SimpleNamespace(ablation_id="abl_1")


def _webhook(url: str) -> None:
    Webhook(url=url, key=b"k" * 32).send("msg", {})


def _sink(url: str) -> None:
    Sink(tracking_uri=url, timeout_s=3, max_retries=0).project(VIEW, None)  # type: ignore[arg-type]


CLIENTS: dict[str, Callable[[str], object]] = {
    "client": lambda url: Client(url, TOKEN).nodes(),
    "worker": lambda url: ServiceApi(url, TOKEN, allow_http=True).version(),
    "webhook": _webhook,
    "readiness": readiness._mlflow,
    "sink": _sink,
    "supervisor": lambda url: prepare_experiment(url, "x"),
}
"""Every kind of our HTTP clients, with one call."""


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in (*AUTHORITIES, "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        for spelled in (name, name.lower()):
            monkeypatch.setenv(spelled, "")  # remembered, and restored at the end
            monkeypatch.delenv(spelled)
    monkeypatch.setenv("ABLATE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ABLATE_ALLOW_HTTP", "true")
    get_client_settings.cache_clear()
    yield
    get_client_settings.cache_clear()


def problem_of(call: Callable[[str], object], url: str) -> str:
    """Return the text of the error that a call ends with; empty for none, or for an answer that is not understood."""
    try:
        call(url)
    except Exception as error:
        return str(error)
    return ""


# ---- proxies


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"])
@pytest.mark.parametrize("name", CLIENTS)
def test_loopback_is_never_reached_through_a_proxy(name: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as proxy, serving() as server:
        monkeypatch.setenv(variable, proxy.url)
        problem_of(CLIENTS[name], server.url)
        assert server.got
        assert proxy.got == []


@pytest.mark.parametrize("name", CLIENTS)
def test_other_addresses_obey_the_proxy_variables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as proxy:
        monkeypatch.setenv("http_proxy", f"http://me:{TOKEN}@127.0.0.1:{proxy.port}")
        problem_of(CLIENTS[name], "http://ablate.invalid:8321")
        assert any("http://ablate.invalid:8321/" in line for line, _ in proxy.got)
        monkeypatch.setenv("http_proxy", "http://me:secret-of-the-proxy@127.0.0.1:9")
        problem = problem_of(CLIENTS[name], "http://ablate.invalid:8321")
        assert "through the proxy http://127.0.0.1:9: nothing listens there" in problem or name == "supervisor"
        assert "secret-of-the-proxy" not in problem
        monkeypatch.setenv("no_proxy", "ablate.invalid")
        assert "proxy" not in problem_of(CLIENTS[name], "http://ablate.invalid:8321")


def test_no_proxy_names_hosts_suffixes_and_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "proxy:3128")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8,.example.org")
    assert proxy_of("https://api.example.com") == "http://proxy:3128"
    for url in ("http://10.1.2.3:8321", "https://a.example.org", "http://127.0.0.2", "http://[::1]:1"):
        assert proxy_of(url) is None, url


def test_a_proxy_that_cannot_be_used_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", f"quic://me:{TOKEN}@proxy:1")
    with pytest.raises(BadSetting, match="the proxy quic://proxy:1 cannot be used") as caught:
        Client("http://ablate.invalid", TOKEN).nodes()
    assert TOKEN not in str(caught.value)


# ---- certificates


@pytest.mark.parametrize("variable", AUTHORITIES)
@pytest.mark.parametrize("name", CLIENTS)
def test_an_internal_authority_is_trusted_by_every_client(
    name: str, variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificates.write(tmp_path)
    with serving(tls=tmp_path) as server:
        refused = problem_of(CLIENTS[name], server.url)
        assert server.got == []
        assert "signed by an authority that this machine does not trust" in refused or name == "supervisor"
        monkeypatch.setenv(variable, str(_folder_of(tmp_path) if variable.endswith("DIR") else tmp_path / "ca.pem"))
        problem_of(CLIENTS[name], server.url)
        assert server.got


def _folder_of(folder: Path) -> Path:
    """Return a folder with the authority under the name that OpenSSL looks for."""
    target = folder / "certs"
    target.mkdir()
    done = subprocess.run(
        ["openssl", "x509", "-hash", "-noout", "-in", folder / "ca.pem"], capture_output=True, text=True, check=True
    )
    (target / f"{done.stdout.strip()}.0").write_bytes((folder / "ca.pem").read_bytes())
    return target


def test_a_variable_that_names_no_authority_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    with pytest.raises(BadSetting, match=r"SSL_CERT_FILE names '.*missing.pem', which does not exist"):
        Client("https://127.0.0.1:1", TOKEN).nodes()
    (tmp_path / "missing.pem").write_text("no certificate")
    with pytest.raises(BadSetting, match="contains no certificate authority in PEM format"):
        Client("https://127.0.0.1:1", TOKEN).nodes()


# ---- reasons


@pytest.mark.parametrize("name", [name for name in CLIENTS if name != "supervisor"])
def test_the_true_reason_of_a_failure_is_told(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    call = CLIENTS[name]
    certificates.write(tmp_path, ends=timedelta(minutes=-1))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with serving(tls=tmp_path) as server:
        assert "its certificate has expired" in problem_of(call, server.url)
        plain = problem_of(call, server.url.replace("https", "http"))
        assert "closed the connection or speaks no HTTP; if it speaks TLS, use an https:// address" in plain
    certificates.write(tmp_path, names=[x509.DNSName("elsewhere.example")])
    with serving(tls=tmp_path) as server:
        assert "its certificate is for another name" in problem_of(call, server.url)
    with serving() as server:
        assert "answers without TLS; use an http:// address" in problem_of(call, server.url.replace("http", "https"))
    assert "nothing listens there" in problem_of(call, f"http://127.0.0.1:{free_port()}")
    assert "its name cannot be resolved" in problem_of(call, "http://ablate.invalid:8321")


@pytest.mark.parametrize("name", ["client", "worker", "sink", "webhook", "readiness"])
def test_no_client_follows_a_redirect(name: str) -> None:
    with serving() as other, serving(status=307, headers={"Location": f"{other.url}/x?secret=1"}) as server:
        problem = problem_of(CLIENTS[name], server.url)
        assert server.got
        assert other.got == []
        assert f"redirects to {other.url}/x, and tokens follow no redirect" in problem or name == "sink"
        assert "secret" not in problem


# ---- who gets a token


def test_without_a_stack_and_an_address_nothing_is_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tokens = tmp_path / "home" / "tokens"
    tokens.mkdir(parents=True)
    (tokens / "admin").write_text(TOKEN)
    (tokens / "worker").write_text(TOKEN)
    with pytest.raises(Unreachable, match=r"nothing runs in .*; start it with `ablate up`, or set ABLATE_URL"):
        Client().nodes()
    with pytest.raises(Exception, match=r"ABLATE_URL is not set, and .*stack\.json does not exist"):
        service_api(Settings())


def test_a_program_on_the_port_of_a_dead_stack_gets_no_token(tmp_path: Path) -> None:
    with serving() as thief:
        home = _home(tmp_path, thief)
        with Client() as client, pytest.raises(Unreachable, match="belongs to another program, which got no token"):
            client.nodes()
        api = service_api(Settings(home=home))
        with pytest.raises(Exception, match="belongs to another program, which got no token"):
            api.version()
        assert thief.got == []


def test_an_embedded_worker_sends_its_key_to_its_own_stack_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ABLATE_STACK_ID", "stack-1")
    with serving() as thief:
        home = _home(tmp_path, thief)
        with pytest.raises(Exception, match="belongs to another program"):
            service_api(Settings(home=home, url=thief.url)).version()
        assert thief.got == []


def test_the_api_of_the_stack_gets_the_token(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    marks = {**os.environ, "ABLATE_STACK_PART": "stack-1.api"}
    own = HomeStack(stack_id="stack-1", api_url=f"http://127.0.0.1:{port}")
    with subprocess.Popen(command, env=marks, stderr=subprocess.DEVNULL) as process:
        until(lambda: _listens(port))
        with http_client(own.api_url, token=TOKEN, stack=own) as client:
            assert client.get("/").status_code == 200
        process.terminate()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _home(folder: Path, server: WebServer) -> Path:
    """Return a home whose stack.json names a stack that is dead; another program has its port."""
    home = folder / "home"
    (home / "tokens").mkdir(parents=True)
    (home / "stack.json").write_text(json.dumps({"stack_id": "stack-1", "api_url": server.url}))
    for name in ("admin", "worker"):
        (home / "tokens" / name).write_text(TOKEN)
    return home


def test_the_token_of_a_home_goes_to_no_other_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serving() as server:
        _home(tmp_path, server)
        monkeypatch.setenv("ABLATE_URL", "https://ablate.invalid")
        get_client_settings.cache_clear()
        assert "Authorization" not in Client()._connection.http.headers
        monkeypatch.setenv("ABLATE_URL", server.url)  # somebody names it: their own choice
        get_client_settings.cache_clear()
        Client().nodes()
        assert TOKEN in server.text


@pytest.mark.parametrize("url", ["http://ablate.invalid:8321", "http://10.0.0.1"])
def test_a_token_leaves_the_machine_unencrypted_only_if_a_setting_allows_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ABLATE_ALLOW_HTTP", "false")
    get_client_settings.cache_clear()
    with pytest.raises(BadSetting, match=r"unencrypted; use an https:// address, or set ABLATE_ALLOW_HTTP=true"):
        Client(url, TOKEN).nodes()
    with pytest.raises(BadSetting, match="ABLATE_ALLOW_HTTP=true"):
        service_api(Settings(url=url, worker_token=TOKEN))  # type: ignore[arg-type]
    assert Client(url).url  # without a token nothing is at stake
    assert Client("http://localhost:8321", TOKEN).url
