"""Everything the service reads from the environment; what its clients read is in client_settings.py, and nowhere else.

Names carry the prefix ABLATE_. Without any of them the embedded stack runs on loopback below ./.ablate.
"""

import os
import socket
from collections.abc import Collection, Mapping
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from experiments.runtime.container_secrets import secrets_folder
from experiments.runtime.logs import LogFormat
from service.client.settings import PREFIX, HomePath
from service.errors import ConfigurationError

PLACEHOLDERS = frozenset(
    {"", "changeme", "change-me", "secret", "password", "admin", "worker", "token", "test", "todo"}
)
"""Values that people leave in a template; the service refuses to start with one."""

MIN_SECRET_CHARS = 16


class ServiceSettings(BaseSettings):
    """Settings of the API and of the background process."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", secrets_dir=secrets_folder())

    home: HomePath = Path(".ablate")
    """Folder of everything that an embedded stack keeps."""
    host: str = "127.0.0.1"
    """Address to listen on; off loopback it needs an administrator's token. An embedded stack has its broker there."""
    port: int = Field(default=8321, ge=1, le=65535)
    """Port of the API; an embedded stack takes the next free one."""
    database_url: str = ""
    """SQLAlchemy URL; empty means SQLite at $ABLATE_HOME/ablate.db."""
    broker_url: str = ""
    """Celery URL; empty means the Valkey socket at $ABLATE_HOME/run/valkey.sock."""
    mlflow_url: str = "http://127.0.0.1:8322"
    """Base URL of the MLflow server, as the service reaches it."""
    mlflow_public_url: str = ""
    """Base URL of the MLflow server in links for people; empty means ABLATE_MLFLOW_URL."""
    mlflow_experiment: str = "ablate"
    """MLflow experiment that ablations go to."""
    projector_lease_s: float = Field(default=30.0, ge=2)
    """Another background process writes an ablation into MLflow when the one that did was silent for this long."""
    lease_s: float = Field(default=30.0, gt=0)
    """A block goes back to the queue when its worker was silent for this long."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """Workers report this often."""
    claim_poll_s: float = Field(default=5.0, gt=0)
    """Workers ask for work at least this often."""
    node_breaks: int = Field(default=3, ge=0)
    """A node is quarantined after so many attempts in a row that broke for its sake; 0 for never."""
    max_body_bytes: int = Field(default=1_048_576, ge=1024)
    """Largest request body, block reports and imports excepted."""
    max_report_bytes: int = Field(default=67_108_864, ge=1024)
    """Largest body of a block report or an import: they carry the raw steps of every trial."""
    max_streams: int = Field(default=1000, ge=1)
    """Event and log streams that one API process keeps open at once."""
    log_format: LogFormat = LogFormat.TEXT
    """How log lines are written: text, or json for programs."""
    log_requests: bool = False
    """Whether the API logs a line for every request."""
    control_every: int = Field(default=10, ge=0)
    """One ablation in so many gets a control arm, which repeats its baseline to watch the noise; 0 for none."""
    outlook_fresh_s: float = Field(default=1.0, ge=0)
    """So old may be what the answer to a submission says of expected device minutes and of nodes that it waits for."""
    webhook_url: str = ""
    """Address that is told when an ablation is over; empty means nobody."""
    webhook_secret: SecretStr | None = None
    """Secret that webhooks are signed with: whsec_ and base64 of at least 24 random bytes."""
    sentinel_days: float = Field(default=7.0, ge=0)
    """Calibrations get new A/A blocks when their last is older than this many days; 0 for none."""
    rate_limit_per_s: float = Field(default=2000.0, gt=0)
    """Requests per second that one token may sustain."""
    rate_limit_burst: int = Field(default=4000, ge=1)
    """Requests that one token may send at once."""
    restart_pause_s: float = Field(default=0.5, gt=0)
    """A part of an embedded stack that ended starts again after this pause, which doubles with every end in a row."""
    generate_tokens: bool = False
    """Generate tokens that are not set, on whatever address; an embedded stack does, which keeps them in its home."""
    log_days: float = Field(default=90.0, ge=0)
    """Logs are dropped when their ablation was over for so many days, receipts never; 0 keeps them."""
    admin_token: SecretStr | None = None
    """Secret of the administrator `admin`; on loopback one is generated."""
    worker_token: SecretStr | None = None
    """Key of the node that comes with this installation; on loopback one is generated, elsewhere it may be absent."""
    node_name: str = Field(default_factory=socket.gethostname, min_length=1, max_length=120)
    """Name of that node: what its worker has as ABLATE_NODE_NAME."""

    @property
    def sqlalchemy_url(self) -> str:
        """The database URL with the default filled in."""
        return self.database_url or f"sqlite:///{self.home / 'ablate.db'}"

    @property
    def celery_url(self) -> str:
        """The broker URL with the default filled in."""
        return self.broker_url or f"redis+socket://{self.home / 'run' / 'valkey.sock'}"

    @property
    def mlflow_link_url(self) -> str:
        """Base URL of the MLflow server as people reach it."""
        return self.mlflow_public_url or self.mlflow_url

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the API."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def makes_tokens(self) -> bool:
        """Whether tokens that are not set are generated into the home."""
        return self.is_loopback or self.generate_tokens

    def checked_secret(self, name: str) -> str | None:
        """Return the secret of ABLATE_<NAME>_TOKEN, None when it is not set.

        Raises ConfigurationError for a placeholder, a short value, or no administrator on an open address.
        """
        variable = f"ABLATE_{name.upper()}_TOKEN"
        secret: SecretStr | None = getattr(self, f"{name}_token")
        if secret is None:
            if name == "admin" and not self.makes_tokens:
                raise ConfigurationError(
                    f"{variable} is not set and ABLATE_HOST is {self.host!r}; an API that other machines can reach "
                    f"needs a secret of at least {MIN_SECRET_CHARS} characters there"
                )
            return None
        value = secret.get_secret_value()
        if value.strip().lower() in PLACEHOLDERS or len(value) < MIN_SECRET_CHARS:
            raise ConfigurationError(
                f"{variable} is a placeholder or too short ({len(value)} characters); "
                f"set at least {MIN_SECRET_CHARS} random characters, for example from `openssl rand -hex 24`"
            )
        return value


@lru_cache(maxsize=1)
def get_settings() -> ServiceSettings:
    """Read the service's settings once."""
    return ServiceSettings()


def child_environment(changes: Mapping[str, str], *, knows: Collection[str] = ()) -> dict[str, str]:
    """Return this process's environment with `changes`, for processes of the embedded stack.

    Secrets and addresses of another installation are left out: the stack makes its own. So are secrets of this one,
    but those that the process `knows`, by their variables.
    """
    hidden = _NOT_INHERITED.difference(knows)
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, **changes}


WEBHOOK_KEY = "ABLATE_WEBHOOK_SECRET"
"""Variable of `webhook_secret`, which the background process alone uses."""
_NOT_INHERITED = frozenset({"ABLATE_URL", "ABLATE_TOKEN", "ABLATE_ADMIN_TOKEN", "ABLATE_WORKER_TOKEN", WEBHOOK_KEY})
