"""Settings of a worker, from environment variables with the prefix ABLATE_."""

import math
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, SecretStr, TypeAdapter, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ablate.experiments.design.spec_values import MOST_LETTERS, NAME_PATTERN, Seconds
from ablate.experiments.documents import settings_problems
from ablate.experiments.ids import own_node_name
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.system.logs import LogFormat
from ablate.experiments.system.setting_values import (
    PREFIX,
    NodeName,
    Secret,
    ServerAddress,
    ServiceAddress,
    home_broker,
    read_secret,
    secrets_folder,
)
from ablate.workers.environment_variables import MOST_QUIET_S, python_environments, stack_id
from ablate.workers.errors import SettingsError
from ablate.workers.paths import MOST_PROCESSES

PLACEHOLDERS = frozenset(
    {"changeme", "change-me", "change_me", "secret", "token", "password", "placeholder", "todo", "xxx"}
)
"""Values that people leave in example files; a worker rejects them as a token."""


def _moment(value: object) -> object:
    """Return the moment in `value`: an ISO time, by default of this machine's zone, or a duration from now."""
    if not isinstance(value, str):
        return value
    with suppress(ValidationError):
        return datetime.now(UTC) + timedelta(seconds=_SECONDS.validate_python(value))
    try:
        return datetime.fromisoformat(value).astimezone()
    except (ValueError, OverflowError):
        allowed = "a time such as 2026-11-29T20:00 or 2026-11-29T20:00Z, or a duration of up to 24h, such as 8h or 90m"
        raise ValueError(f"is {value!r}; allowed: {allowed}") from None


_SECONDS: TypeAdapter[int] = TypeAdapter(Seconds)
Moment = Annotated[datetime, BeforeValidator(_moment)]


class Settings(BaseSettings):
    """All settings of a worker."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="ignore", secrets_dir=secrets_folder(), hide_input_in_errors=True
    )

    home: Path = Path(".ablate")
    """State folder; trials write below its `work`."""
    url: ServiceAddress = ""
    """Base address of the service; empty means the embedded stack's."""
    allow_http: bool = False
    """Whether the worker key may go to another machine by http://, which encrypts nothing."""
    worker_token: Secret | None = None
    """Worker key; default: the content of `tokens/worker` in the state folder."""
    enrolment_token: Secret | None = None
    """Enrolment token, for a worker without a worker key: the worker makes itself a node of its own, which leaves with
    it. Default: the content of `tokens/enrolment` in the state folder."""
    allocation: str | None = None
    """Name of the job of the cluster that started this worker, for a worker that enrols. Default: that of Slurm's job
    or of the pod, otherwise a random one."""
    broker_url: ServerAddress | None = None
    """Celery broker; default: the embedded broker's socket in the state folder."""
    node_name: NodeName = Field(default_factory=own_node_name)
    """Name under which this machine registers; default: the host name, made allowed."""
    node_class: str | None = None
    """Node class to register under; default: the class of the devices that the probes find."""
    data_dir: Path | None = None
    """Prepared datasets; default `data` in the state folder."""
    grace_s: float = Field(default=5.0, ge=0, le=600)
    """Time between SIGTERM and SIGKILL when a trial is stopped."""
    drain_s: float = Field(default=600.0, ge=0, le=86_400)
    """Time that a running block has to finish after SIGTERM or SIGUSR1. The worker releases it then, at a second
    signal, or at once if it should take longer."""
    exit_when_idle: Seconds | None = None
    """The worker ends when it had no block for this long, such as 10m. Default: it stays."""
    until: Moment | None = None
    """The worker ends at this time: ISO, or a duration from its start, such as 8h. It claims no block that should take
    longer, and releases one that runs at this time. Default: it stays."""
    max_blocks: int | None = Field(default=None, ge=1)
    """The worker ends after so many reported blocks. Default: it stays."""
    quiet_s: float = Field(default=60.0, ge=0, le=MOST_QUIET_S)
    """Longest wait before a block whose times decide, while other processes take more of the cores than its spec
    allows. After it the block runs in any case, and maybe again. Later trials do not wait until the cores were quiet
    once. 0 never waits."""
    log_format: LogFormat = LogFormat.TEXT
    """Format of log lines: text, or json for programs."""
    keep_attempts: int = Field(default=20, ge=1)
    """Attempt folders to keep on disk; fewer if they use more than 10 GiB."""
    least_disk_gib: float = Field(default=1.0, ge=0)
    """A node with less free space in its state folder takes no block."""
    trial_disk_gib: float = Field(default=4.0, gt=0)
    """Most space of a running trial's files, and of one of them. A trial that uses more ends as `output_limit`.
    `ablate offline exec` and `ablate check` follow it, too."""
    trial_processes: int = Field(default=MOST_PROCESSES, ge=1, lt=2**22)
    """Most processes of a running trial, and one part in 16 of its threads. A trial that has more ends as `user_error`.
    `ablate offline exec` follows it, too."""
    corpus_dirs: str = ""
    """Folders that may contain a spec's corpus, separated by colons. Empty allows only the built-in ones."""

    accept_code: bool | None = None
    """Whether this node runs commands of specs. Default: only the worker of the embedded stack does."""
    code_dirs: str = ""
    """Folders of this node from which commands may copy code, separated by colons. Empty allows any folder to the
    worker of the embedded stack, and none to others. Code that was sent needs none."""
    trial_readable: str = ""
    """Files and folders that every trial of this node may read, separated by colons. Specs may name them, and those of
    ABLATE_CODE_DIRS and ABLATE_CORPUS_DIRS, in `workload.data`; where any folder may contain code, any other path, too.
    `ablate offline exec` and `ablate check` follow it, too."""
    environments: str = ""
    """Python environments for commands: `name=folder` pairs, separated by commas. A folder may begin with `~`."""
    secrets: Path | None = None
    """File of NAME=value lines with the keys that specs may name in `workload.secrets`; its mode is 0600. Default:
    `secrets` in the state folder. The worker reads it at its start."""

    @field_validator("node_class")
    @classmethod
    def _check_class(cls, value: str | None) -> str | None:
        if value is not None and value not in NODE_CLASSES:
            raise ValueError(f"node class {value!r} is unknown; allowed: {', '.join(NODE_CLASSES)}, or that of a GPU")
        return value

    @field_validator("corpus_dirs", "code_dirs", "trial_readable")
    @classmethod
    def _check_absolute(cls, value: str) -> str:
        relative = [part for part in value.split(":") if part and not Path(part).is_absolute()]
        if relative:
            raise ValueError(f"names {relative[0]!r}; allowed: absolute folders")
        return value

    @field_validator("environments")
    @classmethod
    def _check_environments(cls, value: str) -> str:
        for part in filter(None, value.split(",")):
            name, equals, folder = part.strip().partition("=")
            place = _at_home(folder)
            if not equals or not re.fullmatch(NAME_PATTERN[1:-1], name) or not place.is_absolute():
                raise ValueError(f"has {part!r}; allowed: name=folder, with an absolute folder, or one below ~")
            if len(name) > MOST_LETTERS:
                raise ValueError(f"names {name!r}, of {len(name)} letters; allowed: at most {MOST_LETTERS}")
            if not (place / "bin/python").exists():
                raise ValueError(f"names {folder!r}, which has no bin/python")
        return value

    @field_validator("worker_token", "enrolment_token")
    @classmethod
    def _check_token(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if value is not None:
            check_token(value.get_secret_value(), f"{PREFIX}{str(info.field_name).upper()}")
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
        return self.broker_url or home_broker(self.home_dir)

    @property
    def corpus_roots(self) -> tuple[Path, ...]:
        """Folders that may contain a corpus."""
        return _folders(self.corpus_dirs)

    @property
    def code_roots(self) -> tuple[Path, ...] | None:
        """Folders that may contain the code of commands; None for any."""
        roots = _folders(self.code_dirs)
        return None if not roots and stack_id() is not None else roots

    @property
    def data_roots(self) -> tuple[Path, ...] | None:
        """Files and folders that may contain the data of commands; None for any."""
        roots = self.code_roots
        return None if roots is None else (*roots, *self.corpus_roots, *_folders(self.trial_readable))

    @property
    def lasts_s(self) -> float:
        """Seconds until the worker ends by itself."""
        return math.inf if self.until is None else (self.until - datetime.now(UTC)).total_seconds()

    @property
    def python_environments(self) -> dict[str, Path]:
        """Folders of Python environments by name."""
        return python_environments(self.environments)

    @property
    def secrets_path(self) -> Path | None:
        """File with the secrets of programs, None without one."""
        own = self.home_dir / "secrets"
        return self.secrets.expanduser().absolute() if self.secrets else own if own.exists() else None

    @property
    def takes_commands(self) -> bool:
        """Whether this node runs commands."""
        return stack_id() is not None if self.accept_code is None else self.accept_code

    @property
    def token_file(self) -> Path:
        """File with the worker key, for a worker without ABLATE_WORKER_TOKEN."""
        return self.home_dir / "tokens" / "worker"

    def read_token(self) -> str | None:
        """Return the worker key, None while neither the variable nor the file exists."""
        return _read_token(self.worker_token, self.token_file)

    def read_enrolment_token(self) -> str | None:
        """Return the enrolment token, None while neither the variable nor the file exists."""
        return _read_token(self.enrolment_token, self.home_dir / "tokens" / "enrolment")


def _read_token(value: SecretStr | None, file: Path) -> str | None:
    if value is not None:
        return value.get_secret_value()
    token = read_secret(file)
    if token is not None:
        check_token(token, str(file))
    return token


def _at_home(folder: str) -> Path:
    """Return a folder whose `~` is replaced; it stays where this user has no home folder."""
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        return Path(folder)


def _folders(text: str) -> tuple[Path, ...]:
    return tuple(Path(part) for part in text.split(":") if part)


def check_token(token: str, where: str) -> None:
    """Raise SettingsError, which names its origin `where`, for a token that is empty or a placeholder."""
    if not token:
        raise SettingsError(f"{where} is empty; set it to the worker key that the service was started with")
    if token.lower() in PLACEHOLDERS:
        raise SettingsError(f"{where} is still the placeholder {token!r}; set it to a real worker key")


@lru_cache
def get_settings() -> Settings:
    """Read the settings once. Raises SettingsError with every variable that is wrong."""
    try:
        return Settings()
    except ValidationError as error:
        raise SettingsError("; ".join(settings_problems(error))) from error
