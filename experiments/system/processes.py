"""Control of Linux processes: die with the parent, find by mark or group, end, and check that none is left.

The embedded stack and the workers use it. It needs the standard library only, because a worker's guardian imports it.
"""

import atexit
import ctypes
import errno
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

OWN_PYTHON = (sys.executable, "-P")
"""Begin of the command of a process of ours. It imports nothing from the current folder, where a user may keep files
with the names of our packages."""
_LIBC = ctypes.CDLL(None, use_errno=True)
"""Loaded at import, because a child between fork and exec must not load anything."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02
_KILL_PATIENCE_S = 10.0
"""Time that SIGKILL may take: a process inside a driver call dies only when the call returns."""
_PROCESS_CLOCK = 2
"""Kind of the kernel's clock that runs while any thread of a process does; its number contains that of the process."""
_TICKS = os.sysconf("SC_CLK_TCK")
_LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""
_EXEC_PATIENCE_S = 2.0
"""Time that exec may take. Until the kernel has set up the new program, the process has no environment."""


@dataclass(frozen=True)
class Mark:
    """An environment variable that marks a process and all its descendants, in any group or session."""

    variable: str
    value: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables to add to the environment of a process with this mark."""
        return {self.variable: self.value}

    def members(self) -> list[int]:
        """Return the living processes that started with the mark, except this one."""
        entry = os.fsencode(f"{self.variable}={self.value}")
        return [pid for pid in _others() if entry in _environment(pid) and is_alive(pid)]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The result of `end_all`."""

    killed: tuple[int, ...]
    """Processes that got SIGKILL."""
    survivors: tuple[int, ...]
    """Processes that survived it."""


def die_with_parent(number: signal.Signals = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Ask the kernel to send `number` to this process when the thread that started it ends.

    With the process number of the `parent`, exit at once if it is no longer the parent. Without it there is no check,
    because any process may adopt an orphan, and the parent may be process 1 of a container.
    """
    if _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that it stays findable without its mark."""
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(error)}")


def end_family_with_parent(*, parent: int | None = None, last: Callable[[], None] = lambda: None) -> None:
    """End every descendant of this process, and then itself, on SIGTERM and when the thread that started it ends.

    It ends them at its own exit, too: a fork server exits when it has no clients, and the kernel closes the files of a
    dead worker before it sends the signal of its death. It adopts the orphans among its descendants: after its own end,
    nobody could find those without their mark. It calls `last` when they have ended. `parent` is as for
    `die_with_parent`.
    """
    adopt_orphans()
    # multiprocessing's fork server warns in two lines about each adopted process that ends; a trial may leave thousands
    warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
    own = os.getpid()

    def end_all_below() -> None:
        if os.getpid() == own:
            # again: a look misses a process whose parent ends during it, and which this process adopts then
            end_all(lambda: descendants_of([own]) or descendants_of([own]), grace_s=0)
            last()

    def end_family(number: int, _frame: object) -> None:
        if os.getpid() == own:
            end_all_below()
            os._exit(0)
        signal.signal(number, signal.SIG_DFL)  # a child that has only just been forked
        os.kill(os.getpid(), number)

    atexit.register(end_all_below)
    signal.signal(signal.SIGTERM, end_family)
    die_with_parent(signal.SIGTERM, parent=parent)


def group_members(*pgids: int) -> list[int]:
    """Return the living processes of some groups, except this one."""
    return [pid for pid in _others() if _group_of(pid) in pgids]


def children_of(pid: int) -> list[int]:
    """Return the living children of `pid`, except this process."""
    return [other for other in _others() if (ids := _parent_and_group(other)) is not None and ids[0] == pid]


def parent_of(pid: int) -> int | None:
    """Return the parent of a living process."""
    ids = _parent_and_group(pid)
    return None if ids is None else ids[0]


def descendants_of(pids: Iterable[int]) -> list[int]:
    """Return the living children of `pids`, their children and so on, except this process."""
    parents = {pid: ids[0] for pid in _others() if (ids := _parent_and_group(pid)) is not None}
    first = frozenset(pids)
    if not first:
        return []
    inside = set(first)
    while new := {pid for pid, parent in parents.items() if parent in inside} - inside:
        inside |= new
    return sorted(inside - first)


def family_of(pid: int) -> list[int]:
    """Return a process and its descendants, zombies included: cheaper than to look at every process of the machine."""
    pids = [pid]
    for one in pids:
        with suppress(OSError):  # it has ended
            for children in Path(f"/proc/{one}/task").glob("*/children"):
                pids += map(int, children.read_text(encoding="ascii").split())
    return pids


def family_cpu_s() -> float:
    """Return the processor seconds of all processes below this one, of those that ended, too."""
    import resource  # only trials measure

    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = ended.ru_utime + ended.ru_stime
    for pid in family_of(os.getpid())[1:]:
        with suppress(OSError):  # it has ended
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            spent += time.clock_gettime(~pid << 3 | _PROCESS_CLOCK) + sum(map(int, fields[13:15])) / _TICKS
    return spent


def owns_port(mark: Mark, port: int) -> bool:
    """Return whether only processes with the mark listen on a TCP port; also if no process listens there."""
    listening = _listening_sockets(port)
    return not listening or listening <= {inode for pid in mark.members() for inode in _sockets_of(pid)}


def _listening_sockets(port: int) -> set[str]:
    """Return the inodes of the sockets that listen on a port, on any address."""
    rows = [row.split() for table in ("tcp", "tcp6") for row in _lines(Path("/proc/net") / table)[1:]]
    return {row[9] for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:  # a kernel without IPv6
        return []


def _sockets_of(pid: int) -> set[str]:
    """Return the inodes of a process's sockets; none if it is gone or belongs to another user."""
    inodes = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    except OSError:
        return set()
    return inodes


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it is gone or hidden."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def variable_of(pid: int, name: str) -> str | None:
    """Return a variable with which a process started; None if it had none, is gone or hidden."""
    start = os.fsencode(f"{name}=")
    return next((os.fsdecode(one[len(start) :]) for one in _environment(pid) if one.startswith(start)), None)


def is_alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    return _group_of(pid) is not None


def number_space() -> str:
    """Return the boot and the namespace in which process numbers of this process mean the same process."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def start_of(pid: int) -> int | None:
    """Return when a living process started, in clock ticks since boot: with its number it identifies the process."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to the processes that still exist."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def end_all(find: Callable[[], Sequence[int]], *, grace_s: float) -> Ended:
    """End all processes that `find` returns: SIGTERM, `grace_s` seconds, then SIGKILL. With `grace_s=0` no SIGTERM."""
    if grace_s > 0:
        send(find(), signal.SIGTERM)
        wait_until(lambda: not find(), patience_s=grace_s)
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_PATIENCE_S
    while (pids := find()) and time.monotonic() <= deadline:
        send(pids, signal.SIGKILL)
        killed.update(pids)
        time.sleep(_POLL_S)
    return Ended(killed=tuple(sorted(killed)), survivors=tuple(pids))


def wait_until(condition: Callable[[], bool], *, patience_s: float) -> bool:
    """Wait until the condition is true; return whether it became true within `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


MAX_FOLDER_BYTES = 56
"""Longest folder for temporary sockets. The kernel allows 107 bytes for the path of a Unix socket."""
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - each socket gets a private folder below


def socket_folder() -> Path:
    """Return a folder for temporary sockets, which need short paths; TMPDIR only if no usual folder can be written.

    Raises OSError if there is none.
    """
    for folder in map(Path, (*_SHORT_FOLDERS, tempfile.gettempdir())):
        if len(os.fsencode(folder)) <= MAX_FOLDER_BYTES and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
            return folder
    advice = f"set TMPDIR to a folder with a path of at most {MAX_FOLDER_BYTES} bytes"
    raise OSError(errno.ENAMETOOLONG, f"no folder for sockets; {advice}", tempfile.gettempdir())


def process_numbers() -> list[int]:
    """Return the numbers of all processes of this machine."""
    names = os.listdir("/proc")  # noqa: PTH208 - called in a tight loop, and Path objects double its cost
    return [int(name) for name in names if name.isdigit()]


def _others() -> list[int]:
    own = os.getpid()
    return [pid for pid in process_numbers() if pid != own]


def _group_of(pid: int) -> int | None:
    """Return the process group of a living process, or None."""
    ids = _parent_and_group(pid)
    return None if ids is None else ids[1]


def _parent_and_group(pid: int) -> tuple[int, int] | None:
    """Return (parent, process group) of a living process; None for a zombie or a missing process."""
    fields = _stat(pid)
    return None if fields is None else (int(fields[1]), int(fields[2]))


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; None for a zombie or a missing process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields


def _environment(pid: int) -> list[bytes]:
    """Return the environment with which a process started, as `name=value`."""
    path, deadline = Path(f"/proc/{pid}/environ"), time.monotonic() + _EXEC_PATIENCE_S
    try:
        content = path.read_bytes()
        while not content and _is_inside_exec(pid) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
        return (content or path.read_bytes()).split(b"\0")
    except OSError:
        return []


def _is_inside_exec(pid: int) -> bool:
    """Return whether a process has memory, unlike kernel threads and zombies, but no environment yet."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    # proc(5) counts from 1: vsize is 23 and env_end 51. Here number and name are missing, so each index is 3 less
    size, environment_end = int(fields[20]), int(fields[48])
    return size > 0 and environment_end == 0
