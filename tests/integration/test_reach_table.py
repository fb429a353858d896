"""The table of docs/trust.md: what trials of every kind reach, with a worker of root and one of an ordinary user."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.system.own_tree import SHARED_MEMORY
from ablate.workers.isolation.reach import isolation_problem
from tests.architecture.pages import ROOT
from tests.integration.reach import KINDS, MOST_PROCESSES, answers_as

pytestmark = pytest.mark.skipif(isolation_problem() is not None, reason=f"not isolated here: {isolation_problem()}")

OPEN, CLOSED = "**open**", "closed"
ALL, CONNECTING = tuple(KINDS), ("ranks", "command")
CLOSED_BY = {
    *("EACCES", "EPERM", "EROFS", "ENOENT", "ENOSYS", "EXDEV", "ECONNREFUSED", "ENETUNREACH", "ESRCH", "ENODEV"),
}
PROBES = r"""
import ctypes
library = ctypes.CDLL(None, use_errno=True)
port, abstract, other = (home / "names").read_text().split()
answers = {}
def probe(name, action):
    try:
        answers[name] = repr(action())
    except OSError as error:
        answers[name] = errno.errorcode[error.errno]
def call(number, *arguments):
    if library.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
def connect(family, address):
    with socket.socket(family) as client:
        client.settimeout(5)
        client.connect(address)
probe("read a key", (home / "keys/node").read_bytes)
probe("read a trial", lambda: (home / "work/att_1/trl_other/log.txt").read_bytes())
probe("list tokens", lambda: os.listdir(home / "tokens"))
probe("write", lambda: (home / "keys/node").write_text("x"))
probe("make", lambda: (home / "new").write_text("x"))
probe("remove", lambda: (home / "keys/node").unlink())
probe("rename", lambda: (home / "keys/node").rename(folder / "key"))
probe("mode of a file", lambda: (home / "keys/node").chmod(0o666))
probe("mode of a folder", lambda: (home / "tokens").chmod(0o777))
probe("mode of data", lambda: (home / "data/rows/rows.bin").chmod(0o666))
probe("times", lambda: os.utime(home / "keys/node"))
probe("owner", lambda: os.chown(home / "keys/node", os.getuid(), os.getgid()))
probe("attribute", lambda: os.setxattr(home / "keys/node", "user.x", b"x"))
is_x86 = os.uname().machine == "x86_64"
flags = {"user": 0x10000000, "network": 0x40000000, "mounts": 0x20000, "process": 0x20000000, "time": 0x80}
for kind, flag in flags.items():
    probe(f"unshare {kind}", lambda flag=flag: call(272 if is_x86 else 97, flag))
    if kind != "time":
        probe(f"clone {kind}", lambda flag=flag: call(56 if is_x86 else 220, flag | 0x10000000 | 17, 0, 0, 0, 0))
probe("clone3", lambda: call(435, ctypes.create_string_buffer(64), 64))
probe("setns", lambda: call(308 if is_x86 else 268, os.open("/proc/self/ns/user", os.O_RDONLY), 0))
probe("chroot", lambda: os.chroot(folder))
probe("mount", lambda: call(165 if is_x86 else 40, b"x", os.fsencode(folder), b"tmpfs", 0, None))
for number in (*range(428, 434), 442):
    probe(f"call {number}", lambda number=number: call(number, 0, 0, 0, 0, 0))
for name, number in {"bpf": 321, "userfaultfd": 323, "keyctl": 250}.items() if is_x86 else ():
    probe(name, lambda number=number: call(number, 0, 0, 0, 0, 0))
probe("io_uring", lambda: call(425, 1, ctypes.create_string_buffer(120)))
probe("shared memory", lambda: open("/dev/shm/FILE", "rb").read())
probe("shared memory's names", lambda: os.stat("/dev/shm/FILE"))
Path("/dev/shm/FILE-left").write_bytes(bytes(2**20))
held = open("/dev/shm/FILE-left", "rb")
probe("signal", lambda: os.kill(int(other), signal.SIGCONT))
probe("memory", lambda: open(f"/proc/{other}/mem", "rb"))
probe("environment", lambda: open(f"/proc/{other}/environ", "rb").read())
probe("trace", lambda: call(101 if is_x86 else 117, 16, int(other), None, None))
probe("named socket", lambda: connect(socket.AF_UNIX, str(home / "socket")))
probe("abstract socket", lambda: connect(socket.AF_UNIX, "\0" + abstract))
probe("port", lambda: connect(socket.AF_INET, ("127.0.0.1", int(port))))
probe("cloud", lambda: connect(socket.AF_INET, ("169.254.169.254", 9)))
good = folder / "good"
good.write_text("x")
probe("own mode", lambda: (good.chmod(0o600), shutil.copy2(good, folder / "copy"), os.utime(good)))
from multiprocessing.shared_memory import SharedMemory
probe("own shared memory", lambda: SharedMemory(create=True, size=9).unlink())
probe("null", lambda: open("/dev/null", "w").write("x"))
(folder / "answer").write_text(json.dumps(answers))
for _ in range(MOST + 20):
    if os.fork() == 0:
        time.sleep(300)
time.sleep(300)
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table, and the probes that it stands for."""

    what: str
    probes: tuple[str, ...]
    kinds: tuple[str, ...] = ALL
    own: str = CLOSED
    """With a file tree of its own, as it is with root and with an ordinary user."""
    shared: str = CLOSED

    @property
    def line(self) -> str:
        """The row as Markdown."""
        who = "every trial" if self.kinds == ALL else " and ".join(self.kinds)
        return f"| {self.what} | {who} | {self.own} | {self.own} | {self.shared} |"


ROWS = (
    Row(
        what="read keys, tokens, database, logs, other trials",
        probes=("read a key", "read a trial", "list tokens"),
    ),
    Row(what="write, make, remove or rename files elsewhere", probes=("write", "make", "remove", "rename")),
    Row(
        what="change modes, owners, times, attributes of files elsewhere",
        probes=("mode of a file", "mode of a folder", "mode of data", "times", "owner", "attribute"),
        shared=OPEN,
    ),
    Row(
        what="make or enter a namespace, change root, mount",
        probes=(
            *(f"unshare {kind}" for kind in ("user", "network", "mounts", "process", "time")),
            *(f"clone {kind}" for kind in ("user", "network", "mounts", "process")),
            *("clone3", "setns", "chroot", "mount"),
            *(f"call {number}" for number in (*range(428, 434), 442)),
        ),
    ),
    Row(what="use keyrings, bpf, userfaultfd, io_uring", probes=("bpf", "userfaultfd", "keyctl", "io_uring")),
    Row(what="signal, trace or inspect other processes", probes=("signal", "memory", "environment", "trace")),
    Row(
        what="read or change `/dev/shm` of other programs",
        probes=("shared memory", "shared memory's names"),
        shared=OPEN,
    ),
    Row(what="connect to abstract Unix sockets", probes=("abstract socket",)),
    Row(what="connect to named Unix sockets of the worker's user", probes=("named socket",), kinds=("built-in",)),
    Row(
        what="connect to named Unix sockets of the worker's user",
        probes=("named socket",),
        kinds=CONNECTING,
        shared=OPEN,
    ),
    Row(what="reach the network, ports of the machine, 169.254.169.254", probes=("port", "cloud"), kinds=("built-in",)),
    Row(
        what="reach the network, ports of the machine, 169.254.169.254",
        probes=("port", "cloud"),
        kinds=("ranks",),
        shared=OPEN,
    ),
    Row(
        what="reach the network, ports of the machine, 169.254.169.254",
        probes=("port",),
        kinds=("command",),
        own=OPEN,
        shared=OPEN,
    ),
)
ROLES = ("root", "user") if os.geteuid() == 0 else ("user",)


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    """The answers to all probes by role."""
    by_role: dict[str, dict[str, Any]] = {}
    for role in ROLES:
        home = Path(tempfile.mkdtemp(prefix="ablate-reach-"))
        file = SHARED_MEMORY / f"reach-{os.getpid()}"
        file.write_bytes(b"of another program")
        try:
            for name in ("keys/node", "tokens/admin", "data/rows/rows.bin", "work/att_1/trl_other/log.txt"):
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                (home / name).write_text("s3cret")
            probes = PROBES.replace("FILE", file.name).replace("MOST", str(MOST_PROCESSES))
            by_role[role] = answers_as(home, probes, ordinary=role == "user" and os.geteuid() == 0)
            by_role[role]["left"] = [path.name for path in SHARED_MEMORY.glob(f"{file.name}-*")]
            by_role[role]["other"] = file.read_bytes()
        finally:
            file.unlink()
            shutil.rmtree(home)
    return by_role


@pytest.mark.parametrize("tree", ["own", "shared"])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.what}, {'+'.join(row.kinds)}")
def test_a_row_says_what_trials_reach(answers: dict[str, dict[str, Any]], row: Row, role: str, tree: str) -> None:
    if tree == "own" and answers[role]["tree"] is not None:
        pytest.skip(f"no file tree of its own here: {answers[role]['tree']}")
    expected = row.own if tree == "own" else row.shared
    for kind in row.kinds:
        by_probe = {probe: answers[role][f"{kind}, {tree} tree"].get(probe, "ENOSYS") for probe in row.probes}
        reached = {probe: answer for probe, answer in by_probe.items() if answer not in CLOSED_BY}
        assert bool(reached) == (expected == OPEN), by_probe


@pytest.mark.parametrize("role", ROLES)
def test_a_trial_leaves_nothing_in_shared_memory(answers: dict[str, dict[str, Any]], role: str) -> None:
    assert (answers[role]["left"], answers[role]["other"]) == ([], b"of another program")


@pytest.mark.parametrize("tree", ["own", "shared"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ROLES)
def test_a_trial_with_too_many_processes_ends(
    answers: dict[str, dict[str, Any]], role: str, kind: str, tree: str
) -> None:
    answer = answers[role][f"{kind}, {tree} tree"]
    assert answer["stopped"] == "process limit"
    assert f"processes at once; allowed: {MOST_PROCESSES}" in answer["excess"]
    assert "ABLATE_TRIAL_PROCESSES" in answer["excess"]
    good = ("own mode", "own shared memory", "null")
    assert {name: answer[name] for name in good if answer[name] in CLOSED_BY} == {}


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/trust.md").read_text(encoding="utf-8")
    assert [row.line for row in ROWS if row.line not in page] == []
