"""The file names below an embedded stack's home. No other module spells them."""

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from service.client.settings import get_client_settings
from service.errors import StackError

MAX_SOCKET_BYTES = 100
"""The kernel allows 107 bytes for the path of a Unix socket. The rest is for temporary names."""

_PLAIN_PATH = re.compile(r"[A-Za-z0-9._/@+-]+")
_NOT_IN_A_URL = frozenset("?#%")


@dataclass(frozen=True, kw_only=True)
class StackFiles:
    """The files of one home."""

    home: Path

    def __post_init__(self) -> None:
        bad = sorted(_NOT_IN_A_URL.intersection(str(self.home)))
        if bad:
            raise StackError(
                f"ABLATE_HOME is {str(self.home)!r}; a database URL cannot contain a folder with {bad[0]!r} in its name"
            )

    @property
    def state(self) -> Path:
        """Addresses and process ids while the stack runs."""
        return self.home / "stack.json"

    @property
    def lock(self) -> Path:
        """The supervisor locks it from its start to its end."""
        return self.home / "run" / "stack.lock"

    @property
    def broker_socket(self) -> Path:
        """The broker's socket; below the system's temporary folder if the home's path is too long for a socket."""
        natural = self.home / "run" / "valkey.sock"
        text = str(natural)
        if len(os.fsencode(text)) <= MAX_SOCKET_BYTES and _PLAIN_PATH.fullmatch(text):
            return natural
        name = hashlib.sha256(os.fsencode(str(self.home))).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"ablate-{os.getuid()}-{name}" / "valkey.sock"

    @property
    def broker_url(self) -> str:
        """The broker's URL for Celery."""
        return f"redis+socket://{self.broker_socket}"

    @property
    def broker_config(self) -> Path:
        """Configuration of the broker, written at every start. It may contain the password."""
        return self.home / "run" / "valkey.conf"

    @property
    def broker_password(self) -> Path:
        """Password of the broker for workers on other machines."""
        return self.home / "tokens" / "broker"

    @property
    def broker_data(self) -> Path:
        """Append-only file of the broker."""
        return self.home / "valkey"

    @property
    def mlflow(self) -> Path:
        """Database and artefacts of the MLflow server."""
        return self.home / "mlflow"

    def log(self, part: str) -> Path:
        """Return the log file of one part."""
        return self.home / "logs" / f"{part}.log"

    def save_report(self, ablation_id: str, page: str, path: Path | None = None) -> Path:
        """Write a report page to `path` (default: below the home) and return the absolute path."""
        target = (path or self.home / "reports" / f"{ablation_id}.html").absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")
        return target

    def make_folders(self) -> None:
        """Create every folder that the stack writes to. Only this user can open the socket's folder."""
        for folder in (self.lock.parent, self.broker_data, self.mlflow / "artifacts", self.home / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        private = self.broker_socket.parent
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
        if private.stat().st_uid != os.getuid():
            raise StackError(f"{private} belongs to another user; remove it or choose a shorter ABLATE_HOME")

    def remove_runtime(self) -> None:
        """Remove the state file and the socket, which must not outlive the processes."""
        self.state.unlink(missing_ok=True)
        self.broker_socket.unlink(missing_ok=True)
        if self.broker_socket.parent != self.lock.parent and self.broker_socket.parent.is_dir():
            self.broker_socket.parent.rmdir()


def home_files() -> StackFiles:
    """Return the files of the home in ABLATE_HOME."""
    return StackFiles(home=get_client_settings().home)
