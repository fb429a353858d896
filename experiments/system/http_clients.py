"""HTTP clients of all processes: proxies, certificate authorities, the embedded stack's own port, reasons of failures.

Every client follows the same rules. Loopback is never reached through a proxy; other addresses obey the proxy variables
of curl. The variables of OpenSSL and requests name the trusted authorities. No client follows a redirect.
"""

import errno
import json
import os
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass_environment  # type: ignore[attr-defined]  # typeshed lacks it

import httpx

from ablate.experiments.errors import BadSetting
from ablate.experiments.system.processes import Mark, owns_port
from ablate.experiments.system.setting_values import (
    ALLOW_HTTP,
    credentials_of,
    http_address,
    is_loopback,
    is_plain,
    shown,
)

AUTHORITIES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Variables with the trusted certificate authorities; the first one that is set counts."""
_SYSTEM_AUTHORITIES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_PORT_OF = {"http": 80, "https": 443}
_RECHECK_S = 1.0


class ForeignListener(httpx.ConnectError):
    """The port of the embedded stack belongs to another program, which gets no secret."""


@dataclass(frozen=True, kw_only=True)
class HomeStack:
    """The embedded stack of a home: its address, and the proof that its own API listens there."""

    stack_id: str
    api_url: str

    def check(self) -> None:
        """Raise ForeignListener unless the API of this very stack listens on its port, or nothing does."""
        port = urlsplit(self.api_url).port or _PORT_OF["http"]
        if not owns_port(Mark("ABLATE_STACK_PART", f"{self.stack_id}.api"), port):
            raise ForeignListener(f"port {port} belongs to another program, which got no token")


def home_stack(home: Path) -> HomeStack | None:
    """Return the stack in a home's stack.json, None without one. Raises BadSetting for a damaged file."""
    path = home / "stack.json"
    try:
        values = json.loads(path.read_bytes())
        return HomeStack(stack_id=str(values["stack_id"]), api_url=http_address(str(values["api_url"])))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is damaged; remove it, then run: ablate up"
        raise BadSetting(f"{path} cannot be read: {problem}") from error


def http_client(
    url: str,
    *,
    token: str | None = None,
    allow_http: bool = False,
    stack: HomeStack | None = None,
    timeout: httpx.Timeout | float = 30.0,
) -> httpx.Client:
    """Return a client of the service at `url`.

    `stack` is the embedded stack behind the address; before a request its port is checked, at most once a second.

    Raises:
        BadSetting: a proxy or an authority cannot be used, or the token would leave this machine unencrypted.

    """
    if token and stack is None and not allow_http and is_plain(url):
        raise BadSetting(f"the token would go to {shown(url)} unencrypted; {ALLOW_HTTP}")
    hooks: dict[str, list[Any]] = {} if stack is None else {"request": [_PortCheck(stack)]}
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        return httpx.Client(
            base_url=url, headers=headers, timeout=timeout, event_hooks=hooks, **connection_options(url)
        )
    except ImportError as error:  # a SOCKS proxy needs a package
        raise BadSetting(f"the proxy {shown(str(proxy_of(url)))} cannot be used: {error}") from error


class _PortCheck:
    """The check of a stack's port before a request, remembered for a second."""

    def __init__(self, stack: HomeStack) -> None:
        self._stack = stack
        self._checked_at = float("-inf")

    def __call__(self, _request: httpx.Request) -> None:
        """Check the port."""
        if time.monotonic() - self._checked_at > _RECHECK_S:
            self._stack.check()
            self._checked_at = time.monotonic()


def connection_options(url: str) -> dict[str, Any]:
    """Return httpx's arguments for connections to `url`: proxy, authorities and credentials in the address."""
    return {
        "proxy": _proxy(url),
        "verify": _trust() if url.startswith("https://") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        "auth": credentials_of(url),
        "trust_env": False,
        "follow_redirects": False,
    }


def _proxy(url: str) -> httpx.Proxy | None:
    address = proxy_of(url)
    try:
        return None if address is None else httpx.Proxy(address)
    except (ValueError, httpx.InvalidURL) as error:
        raise BadSetting(
            f"the proxy {shown(str(address))} cannot be used: it must be an address with http, https, socks5 or socks5h"
        ) from error


def proxy_of(url: str) -> str | None:
    """Return the proxy for an address by the variables of curl, None for loopback and the hosts in NO_PROXY."""
    parts = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or is_loopback(url) or _bypasses(parts.hostname or "", parts.netloc.rpartition("@")[2], proxies):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _bypasses(host: str, netloc: str, proxies: dict[str, str]) -> bool:
    if proxy_bypass_environment(netloc, proxies):
        return True
    try:
        address = ip_address(host)
        return any(address in ip_network(one.strip(), strict=False) for one in _networks(proxies.get("no", "")))
    except ValueError:  # a name, or an entry that is no network
        return False


def _networks(no_proxy: str) -> Iterator[str]:
    return (one for one in no_proxy.split(",") if "/" in one)


def authorities() -> Path:
    """Return the file or folder with the trusted certificate authorities. Raises BadSetting if it does not exist."""
    for name in AUTHORITIES:
        value = os.environ.get(name)
        if value:
            path = Path(value)
            if not path.exists():
                raise BadSetting(f"{name} names {value!r}, which does not exist; allowed: a PEM file or a folder")
            return path
    system = [path for path in map(Path, _SYSTEM_AUTHORITIES) if path.is_file()]
    if system:
        return system[0]
    import certifi

    return Path(certifi.where())


def _trust() -> ssl.SSLContext:
    path = authorities()
    try:
        return ssl.create_default_context(
            cafile=None if path.is_dir() else path, capath=path if path.is_dir() else None
        )
    except (OSError, ssl.SSLError) as error:
        raise BadSetting(f"{path} contains no certificate authority in PEM format ({error})") from error


def apply_proxy_rule(url: str) -> None:
    """Make the library `requests`, which reads the process environment only, follow the rule for this address too."""
    host, present = (urlsplit(url).hostname or "").lower(), getproxies().get("no", "")
    if proxy_of(url) is None and host not in present.split(","):
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, (present, host)))


def redirect_hint(answer: httpx.Response) -> str:
    """Return what to do about a redirect, which no client follows with a secret; empty for another answer."""
    if not answer.is_redirect or "location" not in answer.headers:
        return ""
    target = shown(str(answer.request.url.join(answer.headers["location"])))
    return f"; it redirects to {target}, and tokens follow no redirect: use that address"


def reason(error: BaseException, url: str) -> str:
    """Return why a request to `url` failed, in words: name, refusal, certificate, protocol, time or proxy."""
    text = next((words for one in _chain(error) if (words := _words(one, url))), None)
    text = text or f"the connection failed ({type(error).__name__})"
    proxy = proxy_of(url)
    return text if proxy is None else f"through the proxy {shown(proxy)}: {text}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all its causes, the deepest first."""
    causes: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in causes:
        causes.append(current)
        nested = getattr(current, "reason", None)
        current = current.__cause__ or (nested if isinstance(nested, BaseException) else None) or current.__context__
    return reversed(causes)


_CERTIFICATE = {
    **dict.fromkeys((18, 19, 20, 21), "its certificate is signed by an authority that this machine does not trust"),
    9: "its certificate is not valid yet; check the clocks",
    10: "its certificate has expired",
    **dict.fromkeys((62, 64), "its certificate is for another name"),
}
"""By OpenSSL's number of the problem."""
_OS_ERRORS = {
    errno.ECONNREFUSED: "nothing listens there",
    errno.EHOSTUNREACH: "the host cannot be reached",
    errno.ENETUNREACH: "its network cannot be reached",
    errno.ETIMEDOUT: "no answer in time",
}


def _words(error: BaseException, url: str) -> str | None:
    if isinstance(error, ForeignListener):
        return str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        words = _CERTIFICATE.get(error.verify_code, f"its certificate is not accepted: {error.verify_message}")
        hint = f"; {', '.join(AUTHORITIES[:3])} name the trusted ones" if "authority" in words else ""
        return f"{words} ({error.verify_message}){hint}"
    if isinstance(error, ssl.SSLError):
        plain = "WRONG_VERSION_NUMBER" in str(error) or "RECORD_LAYER_FAILURE" in str(error)
        return "it answers without TLS; use an http:// address" if plain else f"TLS failed: {error.reason}"
    if isinstance(error, socket.gaierror):
        return f"its name cannot be resolved ({error.strerror})"
    if isinstance(error, OSError) and error.errno in _OS_ERRORS:
        return _OS_ERRORS[error.errno]
    return _words_of_library(error, url)


def _words_of_library(error: BaseException, url: str) -> str | None:
    """Return words for an error of httpx, httpcore, requests or urllib3, which name their errors alike."""
    name = type(error).__name__
    if name in {"ConnectTimeout", "ConnectTimeoutError"}:
        return "no connection in time"
    if "Timeout" in name:
        return "no answer in time"
    if isinstance(error, httpx.ProxyError):
        return f"the proxy refuses: {error}"
    if name in {"ProtocolError", "RemoteProtocolError", "ReadError", "ConnectionResetError", "RemoteDisconnected"}:
        hint = "; if it speaks TLS, use an https:// address" if url.startswith("http://") else ""
        return f"it closed the connection or speaks no HTTP{hint}"
    return None
