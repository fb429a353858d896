from pathlib import Path

import pytest

from ablate.experiments.errors import BadSetting
from ablate.experiments.system.setting_values import (
    checked_secret,
    credentials_of,
    host_of,
    http_address,
    is_loopback,
    read_secret,
    server_address,
    shown,
    without_credentials,
)

PLANTED = "planted-secret-9f3b"


@pytest.mark.parametrize("text", [f"{PLANTED}\r", f"{PLANTED}\r\n", f" \t{PLANTED}\n\n", PLANTED])
def test_a_secret_loses_surrounding_whitespace(text: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(text.encode())
    assert checked_secret(text) == read_secret(tmp_path / "token") == PLANTED


@pytest.mark.parametrize("bad", ["\r", "\n", " ", "\x00", "\x7f", "é", "\u2028", "\ufeff"])
def test_a_secret_that_no_header_can_carry_is_refused_by_its_file_and_not_shown(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{PLANTED[:5]}{bad}{PLANTED[5:]}", newline="")
    with pytest.raises(BadSetting, match=rf"{path}: its character 6 of 20 is U\+{ord(bad):04X}") as caught:
        read_secret(path)
    assert PLANTED[:5] not in str(caught.value)
    assert PLANTED[5:] not in str(caught.value)


def test_a_missing_or_empty_file_holds_no_secret_and_a_binary_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert read_secret(path) is None
    path.write_text("\n")
    assert read_secret(path) is None
    path.write_bytes(b"\xff\xfe" + PLANTED.encode("utf-16-le"))
    with pytest.raises(BadSetting, match=f"{path}: it is not text"):
        read_secret(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(BadSetting, match=f"{path} cannot be read: Is a directory"):
        read_secret(path)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("", ""),
        (" https://ablate.example/ \n", "https://ablate.example"),
        ("http://127.0.0.1:8321//", "http://127.0.0.1:8321"),
        ("HTTPS://Host/sub/path/", "HTTPS://Host/sub/path"),
        ("http://[::1]:8321", "http://[::1]:8321"),
    ],
)
def test_http_address_is_trimmed(text: str, address: str) -> None:
    assert http_address(text) == address


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("localhost:8321", "has no scheme; write http://localhost:8321 or https://localhost:8321"),
        ("host:8321/sub", "has no scheme; write http://host:8321/sub"),
        (f"me:{PLANTED}@host", "has no scheme; write http://host:port"),
        ("ftp://host", "has the scheme 'ftp'; allowed: https, http"),
        ("https://", "names no host"),
        ("http://:8321", "names no host"),
        ("http://host:port", "is no address"),
        ("http://host:99999", "is no address"),
        ("http://ho st", "contains a space"),
        ("http://host\r\n", ""),
        ("http://host\r/x", "contains a space or a control character"),
        (f"http://me:{PLANTED}@host", "contains a user name or a password"),
        (f"http://me:{PLANTED}/x@host:1", "is no address"),
        (f"http://host/?token={PLANTED}", "contains a query or a fragment"),
    ],
)
def test_http_address_says_what_is_wrong_and_shows_no_secret(text: str, problem: str) -> None:
    if not problem:
        assert http_address(text) == "http://host"
        return
    with pytest.raises(ValueError, match=problem) as caught:
        http_address(text)
    assert PLANTED not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:////home/a b@c/ablate.db",
        "redis+socket:///tmp/a b/valkey.sock",
        "postgresql+psycopg://u:p%40ss@a:5432,b:5433/db?sslmode=verify-full&sslrootcert=system",
        "postgresql+psycopg://postgres:@/postgres?host=/tmp/pg",
        "rediss://:secret@[::1]:6379/0?ssl_cert_reqs=required",
        "redis://broker",
        "memory://",
        "",
    ],
)
def test_server_address_accepts_what_drivers_read(text: str) -> None:
    assert server_address(f" {text}\n") == text


@pytest.mark.parametrize("password", ["a/b", "a@b", "a#b", "a?b", "a b", "a:1@b", "a\rb"])
def test_server_address_refuses_a_password_that_would_be_read_as_host_or_port(password: str) -> None:
    with pytest.raises(ValueError, match="percent-encode") as caught:
        server_address(f"redis://:{PLANTED}{password}@broker:6379/0")
    assert PLANTED not in str(caught.value)


def test_an_address_is_shown_without_secrets() -> None:
    url = f"https://me:{PLANTED}@host:8443/hook/{PLANTED}?key={PLANTED}"
    assert host_of(url) == "https://host:8443"
    assert shown("https://me:pass@host/sub?key=1#x") == "https://host/sub"
    assert without_credentials("https://me:pass@host/sub") == "https://host/sub"
    assert credentials_of("https://me:p%40ss@host") == ("me", "p@ss")
    assert credentials_of("https://host") is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "[::1]", "a.localhost"])
def test_loopback_is_recognised(host: str) -> None:
    assert is_loopback(f"http://{host}:8321/x")


@pytest.mark.parametrize("host", ["10.0.0.1", "localhost.example", "127.0.0.1.example"])
def test_other_hosts_are_not_loopback(host: str) -> None:
    assert not is_loopback(f"http://{host}:8321/x")
