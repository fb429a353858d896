"""PostgreSQL and Redis as a production installation has them: Debian's servers, TLS only, with passwords.

Each keeps everything in a folder of its own, can be killed and started again, and says why it cannot be had here.
"""

import itertools
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from redis import Redis, RedisError

from tests import certificates
from tests.ports import free_port
from tests.waiting import LIMIT_S, POLL_S

_numbers = itertools.count()


def postgres_folder() -> Path | None:
    """Return the folder of the newest PostgreSQL that is installed here, None without one."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    return versions[-1] if versions else None


def no_postgres() -> str | None:
    """Return why there is no PostgreSQL server here, or None."""
    if postgres_folder() is None:
        return "no PostgreSQL server is installed (Debian: apt-get install postgresql)"
    if os.getuid() == 0 and _unprivileged() is None:
        return "PostgreSQL does not run as root, and there is no user postgres"
    return None


def no_redis() -> str | None:
    """Return why there is no Redis server here, or None."""
    program = shutil.which("redis-server")
    return None if program else "no redis-server is installed (Debian: apt-get install redis-server)"


def _unprivileged() -> str | None:
    """Return the user that PostgreSQL runs as where this process is root, which it refuses."""
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        return None


class Server:
    """A server process with a folder, a port and a password."""

    def __init__(self, folder: Path, *, user: str | None) -> None:
        self.folder = folder
        self.port = free_port()
        self.password = secrets.token_urlsafe(24)
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def ca(self) -> Path:
        """Certificate of the authority that signed the server's."""
        return self.folder / "ca.pem"

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._process is not None
        return self._process.pid

    def run(self, command: list[str], answers: Callable[[], bool]) -> None:
        """Start the server and wait until it answers."""
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, user=self._user, cwd=self.folder)
        deadline = time.monotonic() + LIMIT_S
        while not answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{command[0]} did not start: {(self.folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.05)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the server and wait for its end."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(LIMIT_S)


class Postgres(Server):
    """PostgreSQL that takes only TLS connections with a password."""

    def prepare(self) -> None:
        """Make the cluster."""
        words = self.folder / "password"
        words.write_text(self.password)
        for name in (".", "password", "server.key", "server.pem", "ca.pem"):
            if self._user is not None:
                shutil.chown(self.folder / name, user=self._user)
        data, program = str(self.folder / "data"), str(self._bin / "initdb")
        command = [program, "-D", data, "-U", "ablate", "--pwfile", str(words), "--no-sync", "-A", "scram-sha-256"]
        subprocess.run(command, check=True, capture_output=True, user=self._user, cwd=self.folder)
        access = self.folder / "data" / "pg_hba.conf"
        access.write_text("hostssl all all 127.0.0.1/32 scram-sha-256\n")

    def start(self) -> None:
        """Start, or start again after the end."""
        options = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "ssl": "on",
            "ssl_cert_file": str(self.folder / "server.pem"),
            "ssl_key_file": str(self.folder / "server.key"),
            "max_connections": "200",
        }
        words = [word for key, value in options.items() for word in ("-c", f"{key}={value}")]
        command = [str(self._bin / "postgres"), "-D", str(self.folder / "data"), "-p", str(self.port), *words]
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                return self.run(command, self._answers)
            except AssertionError as error:  # processes of a killed server go a moment after it
                if "still in use" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def new_database(self) -> str:
        """Make an empty database; return its SQLAlchemy URL."""
        name = f"ablate_{next(_numbers)}"
        with psycopg.connect(self.conninfo("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self.url(name)

    def url(self, database: str, *, password: str | None = None, options: str | None = None) -> str:
        """Return the SQLAlchemy URL of a database."""
        secured = f"sslmode=verify-full&sslrootcert={self.ca}" if options is None else options
        secret = self.password if password is None else password
        return f"postgresql+psycopg://ablate:{secret}@localhost:{self.port}/{database}?{secured}"

    def conninfo(self, database: str) -> str:
        """Return what libpq and its programs take."""
        return self.url(database).replace("postgresql+psycopg", "postgresql")

    def program(self, name: str, *words: str) -> None:
        """Run one of PostgreSQL's client programs."""
        subprocess.run([str(self._bin / name), *words], check=True, capture_output=True)

    @property
    def _bin(self) -> Path:
        folder = postgres_folder()
        assert folder is not None
        return folder

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.conninfo("postgres"), connect_timeout=int(POLL_S)).close()
        except psycopg.OperationalError:
            return False
        return True


class RedisServer(Server):
    """Redis that takes only TLS connections with a password, with an append-only file."""

    def start(self) -> None:
        """Start, or start again after the end."""
        config = self.folder / "redis.conf"
        config.touch(mode=0o600)
        config.write_text(
            f'port 0\ntls-port {self.port}\nbind 127.0.0.1\nrequirepass {self.password}\nappendonly yes\nsave ""\n'
            f"tls-cert-file {self.folder}/server.pem\ntls-key-file {self.folder}/server.key\n"
            f"tls-ca-cert-file {self.ca}\ntls-auth-clients no\ndir {self.folder}\n"
        )
        self.run(["redis-server", str(config)], self._answers)

    def url(self, *, password: str | None = None, ca: Path | None = None) -> str:
        """Return the broker's URL as Celery takes it."""
        secret = self.password if password is None else password
        return f"rediss://:{secret}@localhost:{self.port}/0?ssl_cert_reqs=required&ssl_ca_certs={ca or self.ca}"

    def client(self) -> Redis:
        """Return a client with the password."""
        return Redis(host="localhost", port=self.port, password=self.password, ssl=True, ssl_ca_certs=str(self.ca))

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except RedisError:
            return False


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Run a PostgreSQL server of its own."""
    with _folder() as folder:
        server = Postgres(folder, user=_unprivileged() if os.getuid() == 0 else None)
        server.prepare()
        try:
            server.start()
            yield server
        finally:
            server.end()


@contextmanager
def redis() -> Iterator[RedisServer]:
    """Run a Redis server of its own."""
    with _folder() as folder:
        server = RedisServer(folder, user=None)
        try:
            server.start()
            yield server
        finally:
            server.end()


@contextmanager
def _folder() -> Iterator[Path]:
    """Give a folder that another user may enter, with certificates in it."""
    with tempfile.TemporaryDirectory(prefix="ablate-server-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        certificates.write(folder)
        yield folder
