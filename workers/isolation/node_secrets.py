"""Secrets of this node: the operator's file of keys, and the mask over their values in everything that a trial leaves.

A mask keeps the length of the text, so that offsets in a log stay true and a file can be masked in place.
"""

import base64
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus

from pydantic import BaseModel

from ablate.experiments.credentials import SHORTEST
from ablate.experiments.design.problems import listed
from ablate.experiments.design.workload import SECRET_NAME, WORKER_VARIABLES
from ablate.workers.errors import SettingsError
from ablate.workers.paths import open_plain

_PIECE_BYTES = 2**20
_LEAST_CUT, _CUT = 4, 60
"""Fewest characters of a secret that are masked where a text of so many was cut inside of it."""
_M = TypeVar("_M", bound=BaseModel)


def read_secrets(path: Path) -> dict[str, str]:
    """Return the secrets in a file of NAME=value lines by name. Raises SettingsError, which shows no value."""
    try:
        with path.open("rb") as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read()
    except OSError as error:
        raise SettingsError(f"the secrets in {path} cannot be read: {error.strerror} (ABLATE_SECRETS)") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        allowed = f"allowed: only its owner, so type: chmod 600 {path}"
        raise SettingsError(f"the secrets in {path} can be opened by others (mode {stat.S_IMODE(mode):04o}); {allowed}")
    secrets: dict[str, str] = {}
    for number, line in enumerate(content.decode("utf-8", "surrogateescape").split("\n"), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, value = _parsed(text, f"{path}, line {number}")
        if name in secrets:
            raise SettingsError(f"{path}, line {number}: {name} is there twice")
        secrets[name] = value
    return secrets


def lacks_secret(node: str, name: str, own: Iterable[str]) -> str:
    """Return the sentence for a secret that a node lacks."""
    return f"node '{node}' has no secret {name} (ABLATE_SECRETS); it has: {listed(sorted(own))}"


def _parsed(line: str, where: str) -> tuple[str, str]:
    name, equals, value = line.removeprefix("export ").partition("=")
    name, value = name.strip(), value.strip()
    if not equals or not SECRET_NAME.fullmatch(name):
        raise SettingsError(f"{where} is no NAME=value, such as HF_TOKEN=hf_...")
    if WORKER_VARIABLES.fullmatch(name):
        raise SettingsError(f"{where}: variable {name} belongs to the worker; it cannot be a secret")
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    if len(value) < SHORTEST or not value.isprintable():
        rule = f"allowed: at least {SHORTEST} printable characters, because the value is masked wherever it appears"
        raise SettingsError(f"{where}: the value of {name} has {len(value)} characters; {rule}")
    return name, value


@dataclass(frozen=True)
class Mask:
    """Replaces the values of secrets by their names, in texts that a trial leaves."""

    secrets: Mapping[str, str]

    @cached_property
    def _forms(self) -> dict[bytes, bytes]:
        """Names by the forms of their values, longest form first."""
        forms = {form: name.encode() for name, value in self.secrets.items() for form in _forms_of(value)}
        return dict(sorted(forms.items(), key=lambda item: -len(item[0])))

    def masked(self, data: bytes) -> bytes:
        """Return `data` with masked secrets, and as long as before.

        At least the first half of a secret counts as one, because messages cut long lines.
        """
        masked = bytearray(data)
        for start, end, name in self._places(data):
            masked[start:end] = _filling(name, end - start)
        return bytes(masked)

    def held(self, data: bytes) -> int:
        """Return how many bytes at the end of `data` may be the beginning of a secret."""
        most = min(len(data), max(map(len, self._forms), default=0) - 1)
        ends = (data[-size:] for size in range(most, 0, -1))
        return next((len(end) for end in ends if any(form.startswith(end) for form in self._forms)), 0)

    def text(self, text: str) -> str:
        """Return a text of a result with masked secrets, also one that was cut inside of a secret."""
        data = text.encode("utf-8", "surrogatepass")
        masked, cut = self.masked(data), self.held(data)
        if cut >= _LEAST_CUT and len(data) >= _CUT and masked[-cut:] == data[-cut:]:
            masked = masked[:-cut] + b"*" * cut
        return text if masked == data else masked.decode("utf-8", "replace")

    def document(self, document: _M) -> _M:
        """Return a document with masked secrets in all of its texts and names."""
        if not self.secrets:
            return document
        return type(document).model_validate(self._values(document.model_dump()))

    def file(self, path: Path) -> None:
        """Mask the secrets in a file that a trial wrote and that nothing writes now."""
        if not self.secrets:
            return
        with suppress(FileNotFoundError), open_plain(path, os.O_RDWR) as file:
            place = 0
            while data := os.pread(file.fileno(), _PIECE_BYTES, place):
                whole = data if len(data) < _PIECE_BYTES else data[: len(data) - self.held(data)]
                for start, end, name in self._places(whole):
                    os.pwrite(file.fileno(), _filling(name, end - start), place + start)
                place += len(whole)

    def _values(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self._values(name): self._values(one) for name, one in value.items()}
        return type(value)(map(self._values, value)) if isinstance(value, list | tuple) else value

    def _places(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Yield start, end and name of every secret in `data`."""
        for form, name in self._forms.items():
            least = max(SHORTEST, len(form) // 2)
            start = data.find(form[:least])
            while start >= 0:
                end = start + least
                while end - start < len(form) and data[end : end + 1] == form[end - start : end - start + 1]:
                    end += 1
                yield start, end, name
                start = data.find(form[:least], end)


def _filling(name: bytes, length: int) -> bytes:
    label = b"[" + name + b"]"
    return label.ljust(length, b"*") if len(label) <= length else b"*" * length


def _forms_of(value: str) -> Iterator[bytes]:
    """Yield the value as programs print it: plain, quoted, in an address, and in Base64 after any other text."""
    plain = value.encode("utf-8", "surrogateescape")
    for quoted in (quote(plain, safe=""), quote_plus(plain)):
        yield from (quoted.encode(), re.sub("%[0-9A-F]{2}", lambda escape: escape[0].lower(), quoted).encode())
    yield from (plain, json.dumps(value)[1:-1].encode(), repr(value)[1:-1].encode("utf-8", "surrogateescape"))
    for shift in range(3):
        whole = base64.b64encode(b"\0" * shift + plain)
        sure = whole[(0, 2, 3)[shift] : (shift + len(plain)) * 8 // 6]  # only these depend on no neighbour
        if len(sure) >= SHORTEST:
            yield from (sure, sure.translate(bytes.maketrans(b"+/", b"-_")))
