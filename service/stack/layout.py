"""The file names below an embedded stack's home. No other module spells them."""

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ablate.experiments.documents import make_state_folder, write_whole
from ablate.experiments.system.processes import socket_folder
from ablate.experiments.system.setting_values import broker_address
from ablate.service.client.settings import get_client_settings
from ablate.service.errors import StackError

MAX_SOCKET_BYTES = 100
"""The kernel allows 107 bytes for the path of a Unix socket. The rest is for temporary names."""

MLFLOW_USER = "ablate"
"""The only account of the MLflow server, which may do everything."""

Report: TypeAlias = Callable[[str, str], None]
"""Receives (kind, text) while the stack starts. Kinds: note, part, ready."""

_PLAIN_PATH = re.compile(r"[A-Za-z0-9._/@+-]+")
_NOT_IN_A_URL = frozenset("?#%")
_FOLDERS = ("run", "mlflow", "logs", "tokens", "data", "work", "reports")
_REMEDY = "remove it, then run: ablate up"


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
        """The broker's socket; below a temporary folder, usually /tmp, if the home's path is too long for a socket."""
        natural = self.home / "run" / "valkey.sock"
        text = str(natural)
        if len(os.fsencode(text)) <= MAX_SOCKET_BYTES and _PLAIN_PATH.fullmatch(text):
            return natural
        name = hashlib.sha256(os.fsencode(str(self.home))).hexdigest()[:12]
        return socket_folder() / f"ablate-{os.getuid()}-{name}" / "valkey.sock"

    @property
    def broker_address(self) -> str:
        """The broker's address on this machine, without its password."""
        return broker_address(self.broker_socket, None)

    @property
    def broker_config(self) -> Path:
        """Configuration of the broker, written at every start. It contains the password."""
        return self.home / "run" / "valkey.conf"

    @property
    def broker_password(self) -> Path:
        """Password of the broker. Workers on other machines need it, too."""
        return self.home / "tokens" / "broker"

    @property
    def mlflow(self) -> Path:
        """Database and artefacts of the MLflow server."""
        return self.home / "mlflow"

    @property
    def mlflow_password(self) -> Path:
        """Password of the MLflow server, which the service alone uses."""
        return self.home / "tokens" / "mlflow"

    @property
    def mlflow_database(self) -> Path:
        """Database of the MLflow server, a copy of results in the service's database."""
        return self.mlflow / "mlflow.db"

    @property
    def database(self) -> Path:
        """The service's SQLite database, the source of everything else."""
        return self.home / "ablate.db"

    def log(self, part: str) -> Path:
        """Return the log file of one part."""
        return self.home / "logs" / f"{part}.log"

    def save_report(self, ablation_id: str, page: str, path: Path | None = None) -> Path:
        """Write a report page to `path` (default: below the home) and return the absolute path."""
        target = (path or self.home / "reports" / f"{ablation_id}.html").absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, page)
        return target

    def make_folders(self) -> None:
        """Create every folder that the stack writes to. Only this user can open the socket's folder.

        Raises StackError for a file or folder that this user cannot write to.
        """
        make_state_folder(self.home)
        for folder in (self.home / name for name in _FOLDERS):
            if folder.exists() and not (folder.is_dir() and os.access(folder, os.R_OK | os.W_OK | os.X_OK)):
                raise StackError(f"{folder} is no folder that this user can write to; {_REMEDY}")
        for file in (self.lock, self.broker_socket, self.broker_config, *(self.home / "logs").glob("*.log")):
            if file.is_dir() or (file.exists() and not os.access(file, os.R_OK | os.W_OK)):
                raise StackError(f"{file} is no file that this user can write to; {_REMEDY}")
        dump = self.lock.parent / "dump.rdb"
        if dump.exists():
            raise StackError(f"{dump} is not from this stack, and the broker would load it; {_REMEDY}")
        for folder in (self.lock.parent, self.mlflow / "artifacts", self.home / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        private = self.broker_socket.parent
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
        if private.stat().st_uid != os.getuid():
            raise StackError(f"{private} belongs to another user; remove it or choose a shorter ABLATE_HOME")

    def remove_runtime(self) -> None:
        """Remove the state file and the socket, which must not outlive the processes."""
        for file in (self.state, self.broker_socket):
            file.unlink(missing_ok=True)
        if self.broker_socket.parent != self.lock.parent and self.broker_socket.parent.is_dir():
            self.broker_socket.parent.rmdir()


def home_files() -> StackFiles:
    """Return the files of the home in ABLATE_HOME."""
    return StackFiles(home=get_client_settings().home)
