"""Values of settings: secrets and addresses, checked when they are read, and shown without passwords.

An error never shows the value, which may contain a secret; the caller names the variable or the file.
"""

import re
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator, SecretStr

from ablate.experiments.errors import BadSetting
from ablate.experiments.ids import node_name_problem

PREFIX = "ABLATE_"
SECRETS_FOLDER = Path("/run/secrets")
"""Container engines mount secrets here: a file `ablate_<setting>` replaces the variable ABLATE_<SETTING>."""
ALLOW_HTTP = "use an https:// address, or set ABLATE_ALLOW_HTTP=true for a network where nobody listens"
_NOT_IN_A_SECRET = re.compile(r"[^!-~]")
_NOT_IN_AN_ADDRESS = re.compile(r"[\x00-\x20\x7f-\x9f]")
_WITHOUT_A_SERVER = re.compile(r"(sqlite(\+.*)?|memory|filesystem|.*\+socket)")
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?")


def secrets_folder() -> Path | None:
    """Return the folder with a container's secrets, or None if there is none."""
    return SECRETS_FOLDER if SECRETS_FOLDER.is_dir() else None


def checked_secret(text: str) -> str:
    """Return a secret without surrounding whitespace. Raises ValueError if a header cannot carry the rest."""
    stripped = text.strip()
    bad = _NOT_IN_A_SECRET.search(stripped)
    if bad is not None:
        where = f"its character {bad.start() + 1} of {len(stripped)} is U+{ord(bad[0]):04X}"
        raise ValueError(f"{where}; allowed in a secret: printable ASCII without spaces (the value is not shown)")
    return stripped


def read_secret(path: Path) -> str | None:
    """Return the secret in a file, None if the file is missing or empty. Raises BadSetting, which names the file."""
    try:
        return checked_secret(path.read_bytes().decode()) or None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadSetting(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        problem = "it is not text; allowed in a secret: printable ASCII without spaces"
    except ValueError as error:
        problem = str(error)
    raise BadSetting(f"{path}: {problem}")


def home_broker(home: Path) -> str:
    """Return the address of the broker of the embedded stack in `home`, with its password once there is one."""
    return broker_address(home / "run" / "valkey.sock", read_secret(home / "tokens" / "broker"))


def broker_address(path: Path, password: str | None) -> str:
    """Return Celery's address of a broker on a Unix socket."""
    return f"redis+socket://{'' if password is None else f':{password}@'}{path}"


def http_address(text: str, *, credentials: bool = False, query: bool = False) -> str:
    """Return an http or https address without surrounding whitespace and slashes at its end; empty stays empty.

    Raises ValueError for any other text, for a user name or password unless `credentials`, and for a query unless
    `query`.
    """
    text = text.strip()
    if not text:
        return text
    if _NOT_IN_AN_ADDRESS.search(text):
        raise ValueError("contains a space or a control character; allowed: https://host or http://host:port")
    scheme, separator, rest = text.partition("://")
    if not separator:
        example = "host:port" if "@" in text else text.lstrip("/")
        raise ValueError(f"has no scheme; write http://{example} or https://{example}")
    if scheme.lower() not in {"http", "https"}:
        raise ValueError(f"has the scheme {scheme!r}; allowed: https, http")
    parts = _parts(text)
    if not parts.hostname:
        raise ValueError("names no host; allowed: https://host or http://host:port")
    if "@" in rest and not credentials:
        raise ValueError("contains a user name or a password; remove it: a token has a variable of its own")
    if parts.fragment or (parts.query and not query):
        raise ValueError("contains a query or a fragment; allowed: https://host/path")
    return text if query else text.rstrip("/")


def _parts(text: str) -> SplitResult:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:  # its text may be a part of a password
        problem = "is no address: its host or port cannot be read; percent-encode special characters of a password"
    else:
        return parts
    raise ValueError(problem)


def server_address(text: str) -> str:
    """Return the address of a database or broker without surrounding whitespace.

    Raises ValueError if a password in it would be read as a part of the host, and then appear in errors.
    """
    text = text.strip()
    scheme, _, rest = text.partition("://")
    if _WITHOUT_A_SERVER.fullmatch(scheme):
        return text
    if _NOT_IN_AN_ADDRESS.search(text):
        raise ValueError("contains a space or a control character; percent-encode it (the value is not shown)")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    hosts = authority.rpartition("@")[2].split(",")
    if rest.count("@") > authority.count("@") or authority.count("@") > 1 or not all(map(_HOST.fullmatch, hosts)):
        raise ValueError("cannot be read; percent-encode special characters of its password (the value is not shown)")
    return text


def without_credentials(address: str) -> str:
    """Return an address without user name and password."""
    scheme, separator, rest = address.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def shown(address: str) -> str:
    """Return scheme, host, port and path of an address, without user name, password and query."""
    scheme, separator, rest = address.partition("://")
    authority, slash, path = re.split("[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def host_of(address: str) -> str:
    """Return scheme, host and port of an address."""
    scheme, separator, rest = shown(address).partition("://")
    return f"{scheme}{separator}{rest.partition('/')[0]}"


def credentials_of(address: str) -> tuple[str, str] | None:
    """Return user name and password of an address, None without them."""
    parts = urlsplit(address)
    return None if parts.username is None else (unquote(parts.username), unquote(parts.password or ""))


def is_loopback(address: str) -> bool:
    """Return whether an address names this machine's loopback interface."""
    host = urlsplit(address).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_plain(address: str) -> bool:
    """Return whether a request to an address leaves this machine unencrypted."""
    return address.lower().startswith("http://") and not is_loopback(address)


def _checked(value: Any) -> Any:
    return checked_secret(value) if isinstance(value, str) else value


def _node_name(name: str) -> str:
    if (problem := node_name_problem(name)) is not None:
        raise ValueError(problem)
    return name


NodeName = Annotated[str, AfterValidator(_node_name)]
Secret = Annotated[SecretStr, BeforeValidator(_checked)]
ServiceAddress = Annotated[str, AfterValidator(http_address)]
MlflowAddress = Annotated[str, AfterValidator(partial(http_address, credentials=True))]
WebhookAddress = Annotated[str, AfterValidator(partial(http_address, credentials=True, query=True))]
ServerAddress = Annotated[str, AfterValidator(server_address)]
