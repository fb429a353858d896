"""The parts of a system under test as processes: start, find, stop and restart them.

Whoever runs the product starts a part again when it ends (systemd, a container engine); here it is `Part.tick`.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RESTART_S = 0.5


@dataclass
class Part:
    """One part: its command and its current process."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    user: str | None = None
    process: "subprocess.Popen[bytes] | None" = None
    works: bytes = b""
    """Words in its log that show that it works; without them it works as soon as it lives."""
    ends: int = 0
    _log_begins: int = field(default=0, repr=False)
    _has_worked: bool = field(default=False, repr=False)
    _down_since: float | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start the process in a new session."""
        with self.log.open("ab") as sink:
            self._log_begins = sink.tell()
            self._has_worked = False
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**_plain_environment(), **self.environment},
                start_new_session=True,
                user=self.user,
                group=self.user,
                extra_groups=[] if self.user else None,
            )

    def tick(self) -> None:
        """Restart the part a little after it ended."""
        if self.process is None or self.process.poll() is None:
            return
        now = time.monotonic()
        if self._down_since is None:
            self._down_since, self.ends = now, self.ends + 1
        elif now - self._down_since > RESTART_S:
            self._down_since = None
            self.start()

    @property
    def is_up(self) -> bool:
        """Whether the process lives and its log says that it works."""
        if self.pid is None:
            return False
        if not self._has_worked:
            with self.log.open("rb") as log:
                log.seek(self._log_begins)
                self._has_worked = self.works in log.read()
        return self._has_worked

    @property
    def pid(self) -> int | None:
        """Return the process id while the process lives."""
        return None if self.process is None or self.process.poll() is not None else self.process.pid

    def stop(self, *, patience_s: float) -> None:
        """Send SIGTERM to the process, then kill its whole session."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        kill_session(self.process.pid)


def _plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("ABLATE_")}


@dataclass(frozen=True)
class Seen:
    """The entry of one living process in /proc."""

    pid: int
    parent: int
    session: int
    born: int
    """Start in clock ticks since boot; with the process id it identifies the process."""


def look(pid: int) -> Seen | None:
    """Return a living process, None for a zombie or an ended one."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, parent, _group, session, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else Seen(pid, int(parent), int(session), int(rest[15]))


def is_running(pid: int) -> bool:
    """Return whether a process lives and is not stopped by SIGSTOP."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZXTt"


def all_processes() -> list[Seen]:
    """Return every living process."""
    numbers = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - in a tight loop
    return [seen for pid in numbers if (seen := look(pid))]


def command_line(pid: int) -> str:
    """Return the command line of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def descendants(pid: int) -> list[Seen]:
    """Return the living descendants of `pid`."""
    everyone, below, parents = all_processes(), [], {pid}
    while fresh := [seen for seen in everyone if seen.parent in parents and seen not in below]:
        below += fresh
        parents = {seen.pid for seen in fresh}
    return below


def kill_session(leader: int) -> None:
    """Kill the remaining processes of the session of `leader`."""
    signal_all([seen.pid for seen in all_processes() if seen.session == leader], signal.SIGKILL)


def signal_all(pids: Sequence[int], number: signal.Signals) -> int:
    """Send a signal to the living processes; return their number."""
    count = 0
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        count += 1
    return count
