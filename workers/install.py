"""`ablate worker install`: a systemd unit and its environment file, so that a worker starts with its machine.

It starts nothing: it shows the files and the commands that start the worker.
"""

import os
import pwd
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ablate.experiments.documents import write_whole
from ablate.experiments.system.setting_values import ALLOW_HTTP, PREFIX, is_plain
from ablate.workers.environment_variables import VISIBLE_GPUS, present
from ablate.workers.errors import InstallRefused
from ablate.workers.settings import Settings

UNITS = Path("/etc/systemd/system")
ENVIRONMENTS = Path("/etc/ablate")
_GPU = re.compile(r"[0-9]{1,3}|GPU-[0-9a-f-]{8,40}")
_STOP_SLACK_S = 60
"""Time that the end of a drained worker may take beyond its limit."""


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """A file that an installation writes."""

    path: Path
    text: str
    mode: int

    def write(self) -> None:
        """Write the file; its mode is set before its content."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, self.text, mode=self.mode)

    @property
    def shown(self) -> str:
        """The text without secrets."""
        return "\n".join(_masked(line) for line in self.text.splitlines())


@dataclass(frozen=True, kw_only=True)
class Installation:
    """A worker to install."""

    settings: Settings
    token: str
    user: str
    root: Path = Path("/")
    """Folder that replaces `/` as the root of all written files, for images that are built elsewhere."""
    gpu: str = ""
    """Index or UUID of the one GPU that this worker uses on a machine with several; part of the files' names."""

    def __post_init__(self) -> None:
        if self.gpu and not _GPU.fullmatch(self.gpu):
            raise InstallRefused(f"--gpu is {self.gpu!r}; allowed: index or UUID of one GPU, see nvidia-smi -L")
        if is_plain(self.settings.url) and not self.settings.allow_http:
            raise InstallRefused(f"the key would go to {self.settings.url} unencrypted; {ALLOW_HTTP}")

    @property
    def unit(self) -> Path:
        """Path of the unit."""
        return UNITS / f"ablate-{self._name}.service"

    @property
    def environment(self) -> Path:
        """Path of its environment file."""
        return ENVIRONMENTS / f"{self._name}.env"

    @property
    def _name(self) -> str:
        return f"worker-{self.gpu}" if self.gpu else "worker"

    def files(self) -> tuple[PlannedFile, ...]:
        """Return the files to write."""
        unit = PlannedFile(path=self._below(self.unit), text=_unit(self), mode=0o644)
        return PlannedFile(path=self._below(self.environment), text=_environment(self), mode=0o600), unit

    def _below(self, path: Path) -> Path:
        return self.root / path.relative_to("/")

    def write(self, *, replace: bool) -> Iterator[str]:
        """Write the files and create the state folder; yield a sentence for each.

        Raises InstallRefused when a file exists with another content, or when this user may not write.
        """
        files = self.files()
        different = [str(f.path) for f in files if f.path.exists() and f.path.read_text(encoding="utf-8") != f.text]
        if different and not replace:
            raise InstallRefused(f"{', '.join(different)} exists with another content; --replace overwrites it")
        try:
            for file in files:
                file.write()
                yield f"wrote {file.path}, mode {file.mode:04o}"
            yield self._make_home()
        except OSError as error:
            raise InstallRefused(f"{error.filename}: {error.strerror}; run it as root") from error

    def _make_home(self) -> str:
        home = self._below(self.settings.home_dir)
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.geteuid() == 0:
            account = find_account(self.user)
            os.chown(home, account.pw_uid, account.pw_gid)
        return f"created {home}, owned by {self.user}"

    def next_commands(self) -> tuple[str, ...]:
        """Return the commands that start the worker."""
        return (
            "systemctl daemon-reload",
            f"systemctl enable --now {self.unit.stem}",
            f"journalctl -fu {self.unit.stem}",
        )


def find_account(user: str) -> pwd.struct_passwd:
    """Return the account of `user`. Raises InstallRefused when this machine has no such user."""
    try:
        return pwd.getpwnam(user)
    except KeyError as error:
        raise InstallRefused(
            f"there is no user {user!r} here; create one: useradd --system --home-dir /var/lib/ablate {user}"
        ) from error


def _environment(installation: Installation) -> str:
    settings = installation.settings
    variables = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields if not name.endswith("_token")}
    values = present(variables) | {
        "ABLATE_URL": settings.url,
        "ABLATE_WORKER_TOKEN": installation.token,
        "ABLATE_NODE_NAME": settings.node_name,
        "ABLATE_NODE_CLASS": settings.node_class or "",
        "ABLATE_HOME": str(settings.home_dir),
        VISIBLE_GPUS: installation.gpu,
    }
    lines = {name: values[name] for name in sorted(values) if values[name]}
    for name, value in lines.items():
        if not value.isprintable() or any(character in value for character in "\"'\\ "):
            raise InstallRefused(f"{name} is {value!r}; allowed: printable, without spaces, quotes and backslashes")
    return "".join(f"{name}={value}\n" for name, value in lines.items())


def _masked(line: str) -> str:
    name, sign, value = line.partition("=")
    if name == "ABLATE_WORKER_TOKEN" or (name == "ABLATE_BROKER_URL" and "@" in value):
        return f"{name}{sign}(not shown)"
    return line


def _unit_path(path: Path | str) -> str:
    """Return a path for a unit, in which a percent sign begins a specifier."""
    return str(path).replace("%", "%%")


def _unit(installation: Installation) -> str:
    home = _unit_path(installation.settings.home_dir)
    stop_s = int(installation.settings.drain_s + installation.settings.grace_s) + _STOP_SLACK_S
    return f"""\
[Unit]
Description=Ablate worker
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
User={installation.user}
EnvironmentFile={_unit_path(installation.environment)}
ExecStart={_unit_path(sys.executable)} -P -m ablate.workers.app
WorkingDirectory={home}
Restart=always
RestartSec=5
# SIGTERM goes to the worker alone, which finishes its block; what is left then is killed
KillMode=mixed
TimeoutStopSec={stop_s}
# a trial that needs too much memory is an answer and no reason to end the worker
OOMPolicy=continue
UMask=0077
NoNewPrivileges=true
ProtectSystem=full
ReadWritePaths={home}

[Install]
WantedBy=multi-user.target
"""
