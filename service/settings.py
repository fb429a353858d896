"""Settings of the service from environment variables with prefix ABLATE_.

Without any variable the embedded stack runs on loopback below ./.ablate. Clients have settings of their own
(`ablate.service.client.settings`).
"""

import fcntl
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from ablate.experiments.documents import settings_problems, write_whole
from ablate.experiments.ids import own_node_name
from ablate.experiments.system.logs import LogFormat
from ablate.experiments.system.setting_values import (
    PREFIX,
    MlflowAddress,
    NodeName,
    Secret,
    ServerAddress,
    ServiceAddress,
    WebhookAddress,
    home_broker,
    secrets_folder,
    without_credentials,
)
from ablate.service.client.settings import HomePath
from ablate.service.errors import ConfigurationError

PLACEHOLDERS = frozenset(
    {"", "changeme", "change-me", "secret", "password", "admin", "worker", "token", "test", "todo"}
)
"""Placeholders of templates; the service does not start with one as a secret."""

MIN_SECRET_CHARS = 16

MLFLOW_PAGES = "/mlflow"
"""Path below which the API forwards MLflow's pages."""


class ServiceSettings(BaseSettings):
    """Settings of the API and of the background process."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="ignore", secrets_dir=secrets_folder(), hide_input_in_errors=True
    )

    home: HomePath = Path(".ablate")
    """Folder of all files of an embedded stack."""
    host: str = "127.0.0.1"
    """Address to listen on; off loopback ABLATE_ADMIN_TOKEN is needed. An embedded stack has its broker there."""
    gateway: bool = False
    """Whether a gateway, such as that of the compose file, limits heads, times and connections; needed off loopback."""
    port: int = Field(default=8321, ge=1, le=65535)
    """Port of the API; an embedded stack takes the next free one."""
    database_url: ServerAddress = ""
    """SQLAlchemy URL; empty means SQLite at $ABLATE_HOME/ablate.db."""
    broker_url: ServerAddress = ""
    """Celery URL; empty means the broker of an embedded stack in ABLATE_HOME."""
    mlflow_url: MlflowAddress = "http://127.0.0.1:8322"
    """Base URL of the MLflow server, as the service reaches it; user name and password are allowed."""
    mlflow_public_url: ServiceAddress = ""
    """Base URL of the MLflow server in links for people; empty means ABLATE_MLFLOW_URL."""
    forward_mlflow: bool = False
    """Whether people who are signed in read MLflow's pages below /mlflow; an embedded stack sets this."""
    public_url: ServiceAddress = ""
    """Base URL of the API as people reach it, for links; with a path if a reverse proxy serves it below one."""
    mlflow_experiment: str = "ablate"
    """MLflow experiment of the ablations."""
    projector_lease_s: float = Field(default=5.0, ge=2)
    """Another background process takes over when the leading one was silent for this long."""
    lease_s: float = Field(default=30.0, gt=0)
    """A block returns to the queue after this long a silence of its worker."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """Interval of the workers' heartbeats."""
    claim_poll_s: float = Field(default=5.0, gt=0)
    """Longest pause between two claims of an idle worker."""
    node_breaks: int = Field(default=3, ge=0)
    """A node is quarantined after this many broken attempts in a row that speak against it; 0 for never."""
    max_body_bytes: int = Field(default=1_048_576, ge=1024)
    """Largest request body, except block reports and imports."""
    max_report_bytes: int = Field(default=67_108_864, ge=1024)
    """Largest body of a block report or an import, which contain the raw steps of every trial."""
    max_streams: int = Field(default=1000, ge=1)
    """Most open event and log streams of one API process."""
    max_token_streams: int = Field(default=250, ge=1)
    """Most of these streams that one token may have open."""
    log_format: LogFormat = LogFormat.TEXT
    """Format of log lines: text, or json for programs."""
    log_requests: bool = False
    """Whether the API logs every request."""
    control_every: int = Field(default=10, ge=0)
    """One in this many ablations gets a control arm, which repeats the baseline to measure the noise, and every one of
    a workload without a calibration; 0 for none."""
    webhook_url: WebhookAddress = ""
    """Address that gets a webhook at the end of each ablation; empty for none."""
    webhook_secret: Secret | None = None
    """Secret that signs webhooks: whsec_ and base64 of at least 24 random bytes."""
    notify_hosts: str = ""
    """Hosts to which owners may have messages sent, separated by commas, such as hooks.slack.com; empty for none."""
    smtp_url: Secret | None = None
    """Mail server for messages to owners: smtps://USER:PASSWORD@HOST or smtp://... with STARTTLS; unset for none."""
    email_from: str = "ablate@localhost"
    """Sender of e-mails."""
    sentinel_days: float = Field(default=7.0, ge=0)
    """Calibrations get new A/A blocks when their last one is older than this many days; 0 for never."""
    rate_limit_per_s: float = Field(default=2000.0, gt=0)
    """Requests per second that one token may sustain."""
    rate_limit_burst: int = Field(default=4000, ge=1)
    """Requests that one token may send at once."""
    restart_pause_s: float = Field(default=0.5, gt=0)
    """Pause before an ended part of an embedded stack restarts; it doubles with every end in a row."""
    generate_tokens: bool = False
    """Generate missing tokens into the home, on any address; an embedded stack sets this."""
    log_days: float = Field(default=90.0, ge=0)
    """Logs are deleted this many days after the end of their ablation, receipts never; 0 keeps the logs."""
    max_code_bytes: int = Field(default=4_294_967_296, ge=0)
    """Most bytes of all code that people sent; a further archive is refused."""
    code_days: float = Field(default=30.0, ge=0)
    """Sent code is deleted this many days after its last use and the end of its last ablation; 0 keeps it."""
    admin_token: Secret | None = None
    """Secret of the administrator `admin`; on loopback a missing one is generated."""
    worker_token: Secret | None = None
    """Key of this installation's own node; on loopback a missing one is generated, elsewhere it is optional."""
    node_name: NodeName = Field(default_factory=own_node_name)
    """Name of that node, the same as ABLATE_NODE_NAME of its worker; default: the host name, made allowed."""

    @property
    def sqlalchemy_url(self) -> str:
        """The database URL with the default filled in."""
        return self.database_url or f"sqlite:///{self.home / 'ablate.db'}"

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """The hosts of `notify_hosts`."""
        return tuple(host for part in self.notify_hosts.split(",") if (host := part.strip().lower()))

    @property
    def celery_url(self) -> str:
        """The broker URL with the default filled in."""
        return self.broker_url or home_broker(self.home)

    @property
    def mlflow_link_url(self) -> str:
        """Base URL of the MLflow server in links for people."""
        return self.mlflow_public_url or without_credentials(self.mlflow_url)

    @property
    def root_path(self) -> str:
        """Path below which people reach the API, for example /ablate; empty for none."""
        return urlsplit(self.public_url).path

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
        """Whether missing tokens are generated into the home."""
        return self.is_loopback or self.generate_tokens

    def check_address(self) -> None:
        """Raise ConfigurationError if other machines can reach the API past a gateway."""
        if not (self.is_loopback or self.gateway):
            raise ConfigurationError(
                f"ABLATE_HOST is {self.host!r}, which other machines can reach, and the API does not limit slow or "
                "endless requests; put a gateway in front (docker/gateway/nginx.conf) and set ABLATE_GATEWAY=true"
            )

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
    """Read the service's settings once. Raises ConfigurationError with every variable that is wrong."""
    try:
        return ServiceSettings()
    except ValidationError as error:
        raise ConfigurationError("; ".join(settings_problems(error))) from error


def generated_secret(path: Path) -> str:
    """Return the secret in a file of the home, which is created if it is missing. Raises ConfigurationError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(path.parent):
            if not path.exists():
                write_whole(path, secrets.token_urlsafe(32) + "\n", mode=0o600)
            secret = _SECRET.fullmatch(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"the secret in {path} can neither be read nor made: {error}") from error
    if secret is None:
        raise ConfigurationError(f"{path} contains no secret; run ablate down, remove the file, and run: ablate up")
    return secret[1].decode()


_SECRET = re.compile(rb"\s*([!-~]{%d,})\s*" % MIN_SECRET_CHARS)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time make the secrets of a folder."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def child_environment(
    changes: Mapping[str, str], *, knows: Collection[str] = (), is_ours: bool = True
) -> dict[str, str]:
    """Return this process's environment with `changes`, for processes of the embedded stack.

    It lacks the addresses and secrets of other installations, because the stack creates its own, the secrets of this
    one, except the variables in `knows`, and settings of the service's libraries. A program that is not ours inherits
    only what every program needs.
    """
    hidden = _NOT_INHERITED.difference(knows)
    kept = {name: value for name, value in os.environ.items() if name not in hidden and not _OF_LIBRARIES.match(name)}
    if not is_ours:
        kept = {name: value for name, value in kept.items() if _OF_EVERY_PROGRAM.fullmatch(name)}
    return {**kept, **_UTF8, **changes}


_OF_LIBRARIES = re.compile(
    r"_?MLFLOW_|DATABRICKS_|CELERY_|KOMBU_|FLASK_|UVICORN_|OTEL_|WEB_CONCURRENCY$|FORWARDED_ALLOW_IPS$|PYTHONWARNINGS$"
)
"""Variables of a shell that would change MLflow, Celery or a server behind our settings."""
_OF_EVERY_PROGRAM = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_.*|TZ|TMPDIR|LD_LIBRARY_PATH|VIRTUAL_ENV|"
    "PYTHON(PATH|HOME|DONTWRITEBYTECODE|PYCACHEPREFIX)"
)
_UTF8 = {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}
"""Our logs and files are UTF-8 in every shell."""


WEBHOOK_KEY = "ABLATE_WEBHOOK_SECRET"
"""Variable of `webhook_secret`, which only the background process uses."""
SMTP_URL = "ABLATE_SMTP_URL"
"""Variable of `smtp_url`, which has a password."""
_NOT_INHERITED = frozenset(
    {
        *("ABLATE_URL", "ABLATE_DATABASE_URL", "ABLATE_BROKER_URL", "ABLATE_MLFLOW_URL"),
        *("ABLATE_TOKEN", "ABLATE_ADMIN_TOKEN", "ABLATE_WORKER_TOKEN", WEBHOOK_KEY, SMTP_URL),
    }
)
