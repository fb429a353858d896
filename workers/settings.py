"""Settings of a worker, from the environment (prefix ABLATE_). The only module here that touches it."""

import socket
from functools import lru_cache
from pathlib import Path

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from experiments.runtime.container_secrets import secrets_folder
from experiments.runtime.logs import LogFormat
from kernels.backends import NODE_CLASSES
from workers.errors import SettingsError

PLACEHOLDERS = frozenset(
    {"changeme", "change-me", "change_me", "secret", "token", "password", "placeholder", "todo", "xxx"}
)
"""Values that people leave in example files; none of them is accepted as a token."""


class Settings(BaseSettings):
    """Everything a worker can be told from outside."""

    model_config = SettingsConfigDict(env_prefix="ABLATE_", frozen=True, extra="ignore", secrets_dir=secrets_folder())

    home: Path = Path(".ablate")
    """State folder; trials write below its `work`."""
    url: str = "http://127.0.0.1:8321"
    """Base address of the service."""
    worker_token: SecretStr | None = None
    """Worker key; without it the file `tokens/worker` in the state folder is read."""
    broker_url: str | None = None
    """Celery broker; default: the embedded broker's socket in the state folder."""
    node_name: str = Field(default_factory=socket.gethostname, min_length=1, max_length=120)
    """Name under which this machine registers."""
    node_class: str | None = None
    """Node class to register under; default: what the probes find."""
    data_dir: Path | None = None
    """Prepared datasets; default `data` in the state folder."""
    poll_s: float = Field(default=5.0, gt=0, le=3600)
    """Ask for work at least this often, wake-up or not."""
    grace_s: float = Field(default=5.0, ge=0, le=600)
    """Between SIGTERM and SIGKILL when a trial is stopped."""
    drain_s: float = Field(default=600.0, ge=0, le=86_400)
    """After SIGTERM a running block may go on for so long; then, or at a second signal, it is given back."""
    log_format: LogFormat = LogFormat.TEXT
    """How log lines are written: text, or json for programs."""
    keep_attempts: int = Field(default=20, ge=1)
    """Attempt folders to keep on disk."""
    least_disk_gib: float = Field(default=1.0, ge=0)
    """A node with less free space in its state folder takes no block."""
    corpus_dirs: str = ""
    """Folders that a spec's corpus may lie in, separated by colons; empty: only `torch-headers` is read."""

    @field_validator("node_class")
    @classmethod
    def _known_class(cls, value: str | None) -> str | None:
        if value is not None and value not in NODE_CLASSES:
            raise ValueError(f"node class {value!r} is unknown; allowed: {', '.join(NODE_CLASSES)}")
        return value

    @field_validator("corpus_dirs")
    @classmethod
    def _absolute(cls, value: str) -> str:
        relative = [part for part in value.split(":") if part and not Path(part).is_absolute()]
        if relative:
            raise ValueError(f"ABLATE_CORPUS_DIRS names {relative[0]!r}; allowed: absolute folders")
        return value

    @field_validator("worker_token")
    @classmethod
    def _no_placeholder(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            check_token(value.get_secret_value(), "ABLATE_WORKER_TOKEN")
        return value

    @property
    def home_dir(self) -> Path:
        """Absolute state folder."""
        return self.home.resolve()

    @property
    def data_path(self) -> Path:
        """Absolute folder of prepared datasets."""
        return (self.data_dir or self.home_dir / "data").resolve()

    @property
    def broker(self) -> str:
        """Celery broker address."""
        return self.broker_url or f"redis+socket://{self.home_dir}/run/valkey.sock"

    @property
    def corpus_roots(self) -> tuple[Path, ...]:
        """Folders that a corpus may lie in."""
        return tuple(Path(part) for part in self.corpus_dirs.split(":") if part)

    def read_token(self) -> str | None:
        """Return the worker key, or None while the file that holds it does not exist yet."""
        if self.worker_token is not None:
            return self.worker_token.get_secret_value()
        path = self.home_dir / "tokens" / "worker"
        if not path.is_file():
            return None
        token = path.read_text().strip()
        check_token(token, str(path))
        return token


def check_token(token: str, where: str) -> None:
    """Raise SettingsError, which names `where` it came from, for a token that is empty or a placeholder."""
    if not token:
        raise SettingsError(f"{where} is empty; give the worker key that the service was started with")
    if token.lower() in PLACEHOLDERS:
        raise SettingsError(f"{where} is still the placeholder {token!r}; give a real worker key")


@lru_cache
def get_settings() -> Settings:
    """Read the settings once."""
    return Settings()
