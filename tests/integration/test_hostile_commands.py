"""Commands that cheat or break out, each as a real isolated trial of a real fork server."""

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.design.kinds.command import CommandArm
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.program_report import report_contradictions
from ablate.experiments.system.kernel_limits import keeps_signals_in
from ablate.workers.commands.code_copy import copy_code
from ablate.workers.isolation.reach import isolation_problem
from ablate.workers.lease import Lease, StopReason, boot_time_s
from ablate.workers.paths import Usage, WorkPaths
from ablate.workers.processes.forkserver import ForkServer
from ablate.workers.processes.guardian import Guardian
from ablate.workers.processes.runner import Ending, TrialRunner
from ablate.workers.processes.wake_event import WakeEvent
from ablate.workers.trials.result import MODULE_FOLDER, TrialResult, read_result
from tests.integration.worker_service import is_gone
from tests.programs import order_for, program_config, write_program
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.skipif(isolation_problem() is not None, reason=f"not isolated here: {isolation_problem()}")

SECRET = "s3cret-of-this-node"
REFUSED = {"EACCES", "EPERM", "ENOENT", "EROFS", "EXDEV", "ESRCH"}
BEFORE = """
import ablate, errno, json, os, signal, socket, subprocess, sys, time
from pathlib import Path
HOME, OUT = Path("{home}"), Path(sys.argv[1])
def attempt(name, action):
    try:
        return name, repr(action())
    except OSError as error:
        return name, errno.errorcode[error.errno]
def answer(values):
    (OUT / "answer").write_text(json.dumps(values))
def train(report=lambda step: step.report(loss=1.0, tokens=10)):
    for step in ablate.steps(seed=7):
        report(step)
"""

Hostile = Callable[..., tuple[Any, Ending, TrialResult | None]]


@pytest.fixture(scope="module")
def runner() -> Iterator[TrialRunner]:
    with Guardian() as guardian:
        limit = Usage(bytes=48 * 2**20, files=500)
        yield TrialRunner(ForkServer(), guardian, WakeEvent(), grace_s=0.2, preempted=lambda: False, most_output=limit)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    for name in ("keys/node", "tokens/worker", "ablate.db"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(SECRET)
    WorkPaths(home=home).trial("att_1", "trl_other").log.write_text(SECRET)
    return home


@pytest.fixture
def hostile(home: Path, tmp_path: Path, runner: TrialRunner) -> Hostile:
    """Return what runs a program; it gives the program's answer, the ending of its trial, and the result."""

    def run(
        source: str, *, files: dict[str, str] | None = None, isolated: bool = True, timeout_s: float = 60.0
    ) -> tuple[Any, Ending, TrialResult | None]:
        code = write_program(tmp_path / "code", BEFORE.replace("{home}", str(home)) + source)
        for name, content in (files or {}).items():
            (code / name).write_text(content)
        order = order_for(config_of(code), home, f"trl_{uuid.uuid4().hex}")
        order = replace(order, dataset=copy_code(order).data_folder)
        order = order.isolated((home,)) if isolated else order
        ending = runner.run(order, Lease(300.0, sent_at=boot_time_s()), timeout_s=timeout_s)
        answer = order.paths.folder / "out" / "answer"
        return (json.loads(answer.read_text()) if answer.exists() else None), ending, read_result(order.paths.result)

    return run


def config_of(code: Path) -> CommandArm:
    return program_config(code, command=("python", "train.py", "{out}"))


WRITES = """
module = Path(ablate.__file__)
source = Path("{source}")
closed = [HOME / "new", HOME / "keys/node", HOME / "work/att_1/trl_other/log.txt", HOME / "data/code/new", module]
closed += [module.parent / "new.py", Path(sys.prefix) / "new", Path(os.__file__), Path("/tmp/by-a-command")]
closed += [source / "train.py"]
answers = [attempt(str(path), lambda path=path: path.write_text("changed")) for path in closed]
answers += [attempt("link", lambda: os.link(HOME / "keys/node", OUT / "link"))]
answers += [attempt("out of the folder", lambda: os.rename(OUT / "..", HOME / "moved"))]
train()
answer(answers)
"""


def test_a_command_writes_nothing_outside_of_its_folder(hostile: Hostile, tmp_path: Path, home: Path) -> None:
    before = (MODULE_FOLDER / "ablate.py").read_bytes()
    answers, _ending, result = hostile(WRITES.replace("{source}", str(tmp_path / "code")))
    assert {name: answer for name, answer in answers if answer not in {*REFUSED, "EISDIR", "ENOTEMPTY", "EBUSY"}} == {}
    assert (MODULE_FOLDER / "ablate.py").read_bytes() == before
    assert (home / "keys/node").read_text() == SECRET
    assert result is not None
    assert result.failure_class is None, result.message


DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (OUT / "pid").write_text(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
while not (OUT / "pid").exists() or not (OUT / "pid").read_text():
    time.sleep(0.01)
train()
answer(int((OUT / "pid").read_text()))
"""


def test_a_daemon_ends_with_its_trial(hostile: Hostile) -> None:
    pid, ending, result = hostile(DAEMON)
    assert ending.survivors == ()
    assert result is not None
    assert result.failure_class is None, result.message
    assert pid > 1
    until(lambda: is_gone(pid))


@pytest.mark.skipif(not keeps_signals_in(), reason="a program could end this test here")
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("os.kill(0, signal.SIGKILL)", "died of SIGKILL"),
        ("os.kill(0, signal.SIGINT); time.sleep(60)", "KeyboardInterrupt"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "died of SIGTERM"),
        ("os.execv('/bin/bash', ['bash', '-c', \"trap 'kill 0' EXIT; sleep 600 & true\"])", "died of SIGTERM"),
        ("subprocess.Popen(['bash', '-c', 'kill -KILL -1']); time.sleep(60)", "died of SIGKILL"),
        ("os.kill(os.getppid(), signal.SIGKILL)", "PermissionError"),
        ("signal.raise_signal(signal.SIGBUS)", "shared memory"),
    ],
)
def test_a_command_that_ends_itself_or_all_that_it_can_reach_answers_for_it(
    hostile: Hostile, source: str, words: str
) -> None:
    _answer, ending, result = hostile(f"train()\n{source}")
    assert (ending.stopped, ending.exit_code, ending.survivors) == (None, 0, ())
    assert result is not None
    assert result.failure_class is FailureClass.USER_ERROR
    assert words in str(result.message)


@pytest.mark.parametrize(
    ("source", "stopped"),
    [
        (
            "with open(OUT / 'big', 'wb') as file:\n    while True:\n        file.write(bytes(2**20))",
            StopReason.OUTPUT_LIMIT,
        ),
        ("for number in range(10_000):\n    (OUT / str(number)).touch()\ntime.sleep(60)", StopReason.OUTPUT_LIMIT),
        ("while True:\n    sys.stdout.write('x' * 2**20)", StopReason.OUTPUT_LIMIT),
        ("ablate.trial().__enter__()\ntime.sleep(600)", StopReason.TIMEOUT),
    ],
)
def test_a_command_that_fills_the_disk_or_never_ends_is_stopped(
    hostile: Hostile, source: str, stopped: StopReason
) -> None:
    _answer, ending, _result = hostile(source, timeout_s=8.0 if stopped is StopReason.TIMEOUT else LIMIT_S)
    assert ending.stopped is stopped


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (r"sys.stdout.write('\x1b[31mred\x07\x9b\r\u202e'); sys.stdout.flush(); sys.exit(3)", "exit code 3"),
        (r"os.write(1, bytes(range(256)) * 40); sys.exit(4)", "exit code 4"),
        (r"raise RuntimeError('\x1b]0;title\x07 \ud800')", "exit code 1"),
        (r"with ablate.trial() as trial: raise RuntimeError('\x1b]0;title\x07')", "RuntimeError"),
    ],
)
def test_control_characters_reach_no_message(hostile: Hostile, source: str, message: str) -> None:
    _answer, _ending, result = hostile(source)
    assert result is not None
    assert result.failure_class is FailureClass.USER_ERROR
    assert message in str(result.message)
    assert [letter for letter in str(result.message) if not letter.isprintable()] == []


FAKE = """
import json, os, socket, time
settings = json.loads(os.environ["ABLATE_TRIAL"])
link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
link.connect(settings["socket"])
def send(event, **values):
    link.send(json.dumps({"event": event, "rank": 0, **values}).encode())
class Step:
    def report(self, **values): pass
def steps(seed=None):
    warm, total, began = 1 + settings["warmup"], 1 + settings["warmup"] + settings["timed"], time.monotonic()
    at = began + 0.001
    send("began", at=began, python="3", implementation="fake", world=1)
    for index in range(total):
        if index == warm:
            send("window began", at=at)
        time.sleep(0.2)
        yield Step()
    send("window ended", at=at + 0.001)
    send("steps", steps=[[i, at + 0.001 * (i + 1 - warm) / (total - warm), 1000, 0.5] for i in range(total)])
    send("ended", at=at + 0.002, seed=seed, whole=True, memory=None, packages={})
"""


def test_a_false_module_cannot_shorten_its_window(hostile: Hostile, tmp_path: Path) -> None:
    """A file `ablate.py` beside the script comes before ours. The kernel's stamps of its messages tell."""
    _answer, _ending, result = hostile("train()", files={"ablate.py": FAKE})
    assert result is not None
    assert result.failure_class is None, result.message
    assert result.program is not None
    config = config_of(tmp_path / "code")
    problems = list(report_contradictions(result.program, config, result.program.window_s))
    assert any("the program's clock gives its window 0.001 s, the worker's 0.6" in one for one in problems), problems


FORGED = """
def forge(*messages):
    link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    link.connect(json.loads(os.environ["ABLATE_TRIAL"])["socket"])
    for message in messages:
        link.send(message if isinstance(message, bytes) else json.dumps(message).encode())
"""


@pytest.mark.parametrize(
    "forged",
    [
        'forge({"event": "steps", "rank": 0, "steps": [[0, 1.0, 10**6, 0.1]]})',
        'forge({"event": "window ended", "rank": 0, "at": 1.0})',
        'forge({"event": "began", "rank": 7, "at": 1.0, "python": "3", "implementation": "x", "world": 1})',
        'forge({"event": "no such", "rank": 0})',
        'forge({"event": "__init__", "rank": 0})',
        "forge(b'not json')",
        "forge(*[b'x' * 1000] * 20_000)",
        "forge(b'[' * 100_000)",
    ],
)
def test_forged_events_end_the_trial_as_the_programs_fault(hostile: Hostile, forged: str) -> None:
    answer, _ending, result = hostile(f"{FORGED}\ntrain()\n{forged}\nanswer('sent')")
    assert answer == "sent"
    assert result is not None
    assert result.failure_class is FailureClass.USER_ERROR, result.message


PARENT = """
parent = os.getppid()
answers = [attempt(name, lambda name=name: os.open(f"/proc/{parent}/{name}", flag)) for name, flag in
           (("mem", os.O_RDWR), ("environ", os.O_RDONLY), ("maps", os.O_RDONLY))]
import ctypes
library = ctypes.CDLL(None, use_errno=True)
def trace():
    if library.ptrace(16, parent, None, None) < 0:
        raise OSError(ctypes.get_errno(), "")
answers += [attempt("ptrace", trace)]
answers += [attempt("result", lambda: [path.name for path in OUT.parent.iterdir()])]
for path in list(OUT.parent.iterdir()):
    if path.is_file():
        path.unlink()
(OUT.parent / "result.json").write_text('{"tokens_per_s": 1e9}')
(OUT.parent / "result.json").chmod(0)
train()
answer(answers)
"""


def test_a_command_changes_neither_its_own_result_nor_the_process_that_writes_it(hostile: Hostile) -> None:
    answers, _ending, result = hostile(PARENT)
    by_name = dict(answers)
    assert {name: by_name[name] for name in ("mem", "environ", "maps", "ptrace") if by_name[name] not in REFUSED} == {}
    assert result is not None
    assert result.failure_class is None, result.message
    assert [step.tokens for step in result.program_steps] == [10] * 5


SHARES = """
from multiprocessing.connection import Client, Listener
def listens():
    with Listener(None, "AF_UNIX") as listener, Client(listener.address):
        return len(listener.address) <= 107
(Path(os.environ["TMPDIR"]) / "file").write_text("x")
train()
answer([os.environ["TMPDIR"], attempt("sockets", listens)])
"""


def test_a_harmless_command_finds_sockets_among_its_temporary_files(hostile: Hostile, tmp_path: Path) -> None:
    """Loaders of data need them; with a path of more than 107 characters their programs waited for ever."""
    assert len(str(tmp_path / "home/work/att_1/trl_1/tmp/pymp-12345678/listener-12345678")) > 107
    (link, lines), ending, result = hostile(SHARES)
    assert (lines, ending.exit_code) == (["sockets", "True"], 0)
    assert result is not None
    assert result.failure_class is None, result.message
    assert not Path(link).is_symlink(), "the worker removes it"
