"""Programs that try to reach what is closed to trials, each as a real trial of a real fork server."""

import json
import multiprocessing
import os
import socket
import sqlite3
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.documents import write_whole
from ablate.experiments.errors import IsolationFailed
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.system.isolation import Isolation
from ablate.experiments.system.kernel_limits import FileRight
from ablate.experiments.system.processes import group_members
from ablate.workers.blocks.slices import _waits
from ablate.workers.isolation.reach import isolation_problem, own_tree_problem
from ablate.workers.lease import Lease, StopReason, boot_time_s
from ablate.workers.paths import TrialPaths, Usage, WorkPaths
from ablate.workers.processes.guardian import Guardian
from ablate.workers.processes.runner import Ending, TrialRunner
from ablate.workers.processes.trial_output import LogTail, TrialOutput, log_stop
from ablate.workers.processes.wake_event import WakeEvent
from ablate.workers.trials.result import read_result, read_steps
from tests.integration.attacker import order_of, server
from tests.integration.worker_service import is_gone
from tests.waiting import LIMIT_S

pytestmark = pytest.mark.skipif(isolation_problem() is not None, reason=f"not isolated here: {isolation_problem()}")

SECRET = "s3cret-of-this-node"
REFUSED = {"EACCES", "EPERM", "ENOENT", "EBUSY", "EXDEV", "EROFS"}
TRY = """
def attempt(name, action):
    try:
        return name, repr(action())
    except OSError as error:
        return name, errno.errorcode[error.errno]
"""
"""What every program below begins with."""

Attack = Callable[..., tuple[Any, Ending]]


@pytest.fixture(scope="module")
def runner() -> Iterator[TrialRunner]:
    with Guardian() as guardian:
        limit = Usage(bytes=32 * 2**20, files=500)
        yield TrialRunner(server(), guardian, WakeEvent(), grace_s=0.2, preempted=lambda: False, most_output=limit)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A state folder with every kind of secret, and another trial beside the attacker."""
    home = tmp_path / "home"
    for name in ("keys/node", "tokens/admin", "tokens/worker", "worker.log"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(SECRET)
    with sqlite3.connect(home / "ablate.db") as database:
        database.execute(f"CREATE TABLE secrets AS SELECT '{SECRET}' AS secret")
    WorkPaths(home=home).trial("att_1", "trl_other").log.write_text(SECRET)
    (home / "data/rows").mkdir(parents=True)
    (home / "data/rows/rows.bin").write_text("rows")
    return home


@pytest.fixture
def attack(home: Path, runner: TrialRunner) -> Attack:
    def run(program: str, *, timeout_s: float = 60.0, isolated: bool = True) -> tuple[Any, Ending]:
        order = order_of(home, TRY + program, isolated=isolated)
        ending = runner.run(order, Lease(300.0, sent_at=boot_time_s()), timeout_s=timeout_s)
        answer = order.paths.folder / "answer"
        return (json.loads(answer.read_text()) if answer.exists() else order.paths.log.read_text()), ending

    return run


READS = """
closed = ["keys/node", "tokens/admin", "tokens/worker", "ablate.db", "worker.log", "work/att_1/trl_other/log.txt"]
paths = [home / name for name in closed]
paths += [Path(f"/proc/self/root{home}/keys/node"), folder / "../../../keys/node"]
inspected = ("environ", "mem", "maps", f"root{home}/keys/node", "cwd/Makefile")
paths += [Path(f"/proc/{worker}/{name}") for name in inspected]
paths += [Path("/etc/shadow"), Path("/root/.bash_history"), Path("/etc/ablate/worker.env"), Path("/proc/kcore")]
(folder / "link").symlink_to(home / "keys/node")
answers = [attempt(str(path), path.read_bytes) for path in [*paths, folder / "link"]]
answers += [attempt("listing", lambda: os.listdir(home)), attempt("tokens", lambda: os.listdir(home / "tokens"))]
for number in os.listdir(f"/proc/{worker}/fd"):
    answers += [attempt(f"file {number}", lambda number=number: os.readlink(f"/proc/{worker}/fd/{number}"))]
    answers += [attempt(f"file {number}", lambda number=number: os.open(f"/proc/{worker}/fd/{number}", os.O_RDONLY))]
answers += [attempt("hard link", lambda: os.link(home / "keys/node", folder / "hard"))]
answers += [attempt("rename", lambda: os.rename(home / "keys/node", folder / "renamed"))]
answers += [("cat", repr(subprocess.run(["cat", home / "keys/node"], capture_output=True).returncode))]
good = [attempt("own", lambda: (folder / "mine").write_text("x"))]
good += [attempt("data", (home / "data/rows/rows.bin").read_text)]
good += [attempt("environment", lambda: [name for name in os.environ if name.startswith("ABLATE") and "TOKEN" in name])]
good += [attempt("temporary", lambda: os.path.samefile(__import__("tempfile").gettempdir(), folder / "tmp"))]
(folder / "answer").write_text(json.dumps([answers, good]))
"""


def test_a_trial_reads_no_key_token_database_or_other_trial(attack: Attack, home: Path) -> None:
    (answers, good), ending = attack(READS)
    assert ending.exit_code == 0
    reached = {name: answer for name, answer in answers if answer not in {*REFUSED, "1"}}
    assert reached == {}
    assert (home / "keys/node").read_text() == SECRET
    assert dict(good) == {"own": "1", "data": "'rows'", "environment": "[]", "temporary": "True"}


def test_the_same_program_reads_them_where_nothing_isolates(attack: Attack) -> None:
    """The positive control: these attacks work."""
    (answers, _good), _ending = attack(READS, isolated=False)
    reached = [name for name, answer in answers if SECRET in answer]
    assert len(reached) >= 8


WRITES = """
closed = [home / "new", home / "ablate.db", home / "keys/node", home / "data/rows/rows.bin", home / "data/new"]
closed += [Path("/tmp/written-by-a-trial"), Path("/usr/new"), Path("/etc/passwd")]
closed += [home / "work/att_1/trl_other/log.txt", home / "work/att_1/new", Path(shutil.__file__)]
answers = [attempt(str(path), lambda path=path: path.write_text("changed")) for path in closed]
opened = [f"/proc/{worker}/oom_score_adj", f"/proc/{worker}/clear_refs", "/proc/sys/kernel/core_pattern", "/dev/tty"]
opened += [str(path) for path in Path("/dev").glob("[sv]da*")]
answers += [attempt(path, lambda path=path: os.open(path, os.O_WRONLY)) for path in opened]
answers += [attempt("truncate", lambda: os.truncate(home / "ablate.db", 0))]
answers += [attempt("remove", lambda: os.unlink(home / "keys/node"))]
answers += [attempt("rename", lambda: os.rename(folder, folder.parent / "moved"))]
answers += [attempt("device", lambda: os.mknod(folder / "disk", 0o60600, os.makedev(254, 0)))]
answers += [attempt("mount", lambda: 0 if not os.system("mount -t tmpfs x /mnt 2>&-") else os.stat("/absent"))]
(folder / "answer").write_text(json.dumps(answers))
"""


def test_a_trial_writes_nothing_outside_of_its_folder(attack: Attack, home: Path) -> None:
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    answers, _ending = attack(WRITES)
    written = {name: answer for name, answer in answers if answer not in REFUSED}
    assert written == {}
    assert {path: path.read_bytes() for path in before} == before
    assert not Path("/tmp/written-by-a-trial").exists()  # noqa: S108 - what the program tried


REACHES = """
guardian, fork_server, address = int(sys.argv[3]), os.getppid(), (home / "address").read_text()
answers = [attempt(f"signal {pid}", lambda pid=pid: os.kill(pid, signal.SIGCONT)) for pid in (worker, fork_server)]
def reach(family, target):
    with socket.socket(family) as client:
        client.connect(target)
answers += [attempt("unix", lambda: reach(socket.AF_UNIX, str(home / "broker.sock")))]
answers += [attempt("abstract", lambda: reach(socket.AF_UNIX, "\\0" + address))]
answers += [attempt("network", lambda: reach(socket.AF_INET, ("127.0.0.1", int(address.rpartition(":")[2]))))]
names = (home / "names").read_text().split()
answers += [attempt(name, lambda name=name: reach(socket.AF_UNIX, name)) for name in names]
kinds = [("AF_INET", "SOCK_DGRAM"), ("AF_INET", "SOCK_STREAM"), ("AF_NETLINK", "SOCK_RAW"), ("AF_UNIX", "SOCK_DGRAM")]
for names in kinds:
    answers += [attempt(" ".join(names), lambda: print(socket.socket(*(getattr(socket, name) for name in names))))]
pair = socket.socketpair()
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind("\\0listener-of-a-trial")
listener.listen()
(folder / "answer").write_text(json.dumps(answers))
"""


@pytest.mark.parametrize("sockets", [False, True])
def test_a_trial_signals_no_process_and_reaches_no_socket(home: Path, runner: TrialRunner, sockets: bool) -> None:
    """One that may use sockets reaches the network only; without a file tree of its own, named sockets of its user."""
    with socket.socket(socket.AF_UNIX) as broker, socket.socket() as network, socket.socket(socket.AF_UNIX) as abstract:
        broker.bind(str(home / "broker.sock"))
        network.bind(("127.0.0.1", 0))
        address = f"ablate-test-{os.getpid()}:{network.getsockname()[1]}"
        abstract.bind(f"\0{address}")
        for place in (broker, network, abstract):
            place.listen()
        order = order_of(home, TRY + REACHES)
        assert order.isolation is not None
        order = replace(order, isolation=replace(order.isolation, sockets=sockets, own_network=False))
        (home / "address").write_text(address)
        (home / "names").write_text("\n".join(_sockets_of(runner)))
        notes = (home / "address", home / "names")
        isolation = replace(order.isolation, readable=(*order.isolation.readable, *notes))
        runner.run(replace(order, isolation=isolation), Lease(300.0, sent_at=boot_time_s()), timeout_s=60.0)
    answers = json.loads((order.paths.folder / "answer").read_text())
    reached = [name for name, answer in answers if answer == "None"]
    everything = [name for name, _answer in answers if name.startswith("AF_")]
    assert len(everything) == 4
    named = ["unix"] if own_tree_problem() else []
    assert reached == ([*named, "network", *everything] if sockets else [])


def test_the_socket_of_the_fork_server_has_no_name(runner: TrialRunner) -> None:
    """Who connects to it runs code that is not isolated, as the worker's user."""
    assert runner.server.call(os.getpid, patience_s=LIMIT_S) != os.getpid()
    names = _sockets_of(runner)
    assert names
    assert [name for name in names if Path(name).exists()] == []


def _sockets_of(runner: TrialRunner) -> list[str]:
    """Return the paths at which the fork server listens or has listened."""
    runner.server.call(os.getpid, patience_s=LIMIT_S)
    files = Path(f"/proc/{runner.server.pid}/fd")
    inodes = {str(link.readlink()) for link in files.iterdir()}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return [row[-1] for row in rows if f"socket:[{row[6]}]" in inodes and "/listener-" in row[-1]]


@pytest.mark.parametrize("kind", ["symlink", "fifo", "folder", "socket"])
def test_the_worker_follows_no_link_and_waits_for_no_pipe_that_a_trial_left(
    home: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = WorkPaths(home=home).trial("att_1", "trl_traps")
    secret = home / "keys/node"
    for path in (paths.log, paths.steps, paths.result, paths.receipt):
        if kind == "symlink":
            path.symlink_to(secret)
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            with socket.socket(socket.AF_UNIX) as trap:
                monkeypatch.chdir(path.parent)  # a socket's path is short
                trap.bind(path.name)
    answers: list[Any] = []

    def read() -> None:
        answers.append(LogTail("trl", paths.log).next_chunk())
        answers.append(TrialOutput("trl", paths, steps_total=3).progress().steps_done)
        answers.extend((read_steps(paths.steps), read_result(paths.result)))
        log_stop(paths.log, StopReason.TIMEOUT, 1.0, "no steps")
        paths.receipt.with_name("receipt.json.part").mkdir()
        paths.make_room(paths.receipt)
        write_whole(paths.receipt, "{}")

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert answers == [None, 0, (), None]
    assert secret.read_text() == SECRET


def test_a_forged_result_is_a_failure_of_the_trial(tmp_path: Path) -> None:
    paths = TrialPaths(folder=tmp_path)
    for forged in ("{", "[]", '{"loss_val": "high"}', "\x1b[2J\x00", "nan", '{"facts": 3, "more": 1}'):
        paths.result.write_text(forged)
        paths.steps.write_text(f"{forged}\n")
        result = read_result(paths.result)
        assert result is not None
        assert result.failure_class is FailureClass.USER_ERROR
        assert "no result" in (result.message or "")
        assert read_steps(paths.steps) == ()
        assert TrialOutput("trl", paths, steps_total=3).progress().steps_done == 0


FILLS = {
    "one file": "file = open(folder / 'big', 'wb')\nwhile True: file.write(bytes(2**20)); file.flush()",
    "temporary files": "file = open(folder / 'tmp' / 'big', 'wb')\nwhile True: file.write(bytes(2**20)); file.flush()",
    "a file without a name": (
        "file = open(folder / 'big', 'wb'); os.unlink(folder / 'big')\n"
        "for _ in range(100): file.write(bytes(2**20)); file.flush()\n"
        "time.sleep(300)"
    ),
    "many files": "for n in range(600): (folder / 'tmp' / str(n)).touch()\ntime.sleep(300)",
    "its log": "while True: sys.stdout.write('x' * 2**20)",
    "files and its end": "(folder / 'big').write_bytes(bytes(100 * 2**20))",
}


@pytest.mark.parametrize("how", FILLS)
def test_a_trial_that_fills_the_disk_ends(attack: Attack, how: str) -> None:
    _log, ending = attack(FILLS[how])
    assert ending.stopped is StopReason.OUTPUT_LIMIT
    assert ending.wall_s < 30


def test_what_a_trial_wrote_beyond_its_limit_is_removed_and_its_log_stays(tmp_path: Path) -> None:
    paths = TrialPaths(folder=tmp_path / "trial")
    (paths.folder / "deep/er").mkdir(parents=True)
    (paths.folder / "deep/er/big").write_bytes(bytes(100))
    (paths.folder / "out").symlink_to(tmp_path)
    (tmp_path / "other").touch()
    paths.log.write_text("log")
    paths.drop_output()
    assert sorted(path.name for path in paths.folder.iterdir()) == ["log.txt"]
    assert (tmp_path / "other").exists()


STRAYS = """
def stray():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, [sys.executable, "-c", "import signal, time\\n"
                "for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\\n"
                "time.sleep(300)"], {})
        os._exit(0)
for _ in range(3): stray()
(folder / "answer").write_text(json.dumps(os.getpid()))
print(open("/proc/self/oom_score_adj").read())
"""


def test_daemons_with_an_empty_environment_end_with_their_trial(attack: Attack, runner: TrialRunner) -> None:
    trainer, ending = attack(STRAYS)
    assert (ending.exit_code, ending.survivors) == (0, ())
    assert group_members(trainer) == []
    assert runner.server.pid is not None
    assert _below(runner.server.pid) == []


def test_the_kernel_ends_a_trial_first_when_memory_runs_out(attack: Attack, home: Path) -> None:
    attack(STRAYS)
    assert "1000" in WorkPaths(home=home).trial("att_1", "trl_attacks").log.read_text()


def test_a_secret_inside_of_a_readable_folder_stays_closed(tmp_path: Path) -> None:
    for name in ("a/secret/key", "a/open", "a/b/open", "a/b/other/key"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a/link").symlink_to(tmp_path / "a/secret")
    hidden = (tmp_path / "a/secret", tmp_path / "a/b/other")
    isolation = Isolation(readable=(tmp_path / "a", tmp_path / "a/b/other/key"), writable=(), hidden=hidden)
    readable = [path for path, rights in isolation.rules().items() if rights & FileRight.READ_FILE]
    opened = {path.relative_to(tmp_path).as_posix() for path in readable if path.is_relative_to(tmp_path)}
    assert opened == {"a/open", "a/b/open", "a/b/other/key"}


SHARES = """
import multiprocessing.connection
def listens():
    with multiprocessing.connection.Listener(None, "AF_UNIX") as listener:
        with multiprocessing.connection.Client(listener.address):
            return len(listener.address)
(folder / "answer").write_text(json.dumps(attempt("sockets", listens)))
"""


def test_processes_that_load_data_find_each_other_below_a_long_state_folder(
    tmp_path: Path, runner: TrialRunner
) -> None:
    """They make sockets among their temporary files, and the path of a socket has at most 107 characters."""
    home = tmp_path / ("a-long-name-" * 8)
    (home / "data/rows").mkdir(parents=True)
    order = order_of(home, TRY + SHARES)
    assert order.isolation is not None
    order = replace(order, isolation=replace(order.isolation, sockets=True))
    runner.run(order, Lease(300.0, sent_at=boot_time_s()), timeout_s=60.0)
    name, length = json.loads((order.paths.folder / "answer").read_text())
    assert (name, int(length) <= 107) == ("sockets", True)
    assert not order.paths.temporary.exists()


def test_a_writable_folder_around_a_secret_is_refused(tmp_path: Path) -> None:
    isolation = Isolation(readable=(), writable=(tmp_path,), hidden=(tmp_path / "keys",))
    with pytest.raises(IsolationFailed, match=r"which contains .*keys with the keys of this node"):
        isolation.rules()
    with pytest.raises(IsolationFailed, match="which is no folder"):
        replace(isolation, writable=(tmp_path / "absent",)).rules()


def _below(pid: int) -> list[str]:
    lines = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, check=False)
    return [line for line in lines.stdout.split() if not is_gone(int(line))]


def test_a_trial_cannot_announce_a_message_and_let_the_worker_wait_for_it() -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        os.write(theirs.fileno(), struct.pack("!i", 2**31 - 1))
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.append(_waits(ours)), daemon=True)
        thread.start()
        thread.join(LIMIT_S)
        assert answers == [True]
        assert not ours.poll()
    assert not _waits_on_closed()


def _waits_on_closed() -> bool:
    ours, theirs = multiprocessing.Pipe()
    with ours:
        theirs.close()
        return _waits(ours)
