"""Parts that end by themselves: what they leave is ended, and they start again, with pauses and a limit."""

import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.system.processes import is_alive
from ablate.service.stack import part_processes
from ablate.service.stack.layout import StackFiles
from ablate.service.stack.part_processes import PartRun, describe_exit
from ablate.service.stack.parts import LOOPBACK, StackPart, free_port
from ablate.service.stack.state import PartPhase
from tests.clock import Clock
from tests.waiting import LIMIT_S, until

SLEEPER = "import time; time.sleep(600)"
SERVER = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True: server.accept()[0].close()
"""
PARENT_OF_A_SERVER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], start_new_session=True)
time.sleep(600)
"""
DEAF_ORPHAN = """
import os, signal, subprocess, sys
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
os._exit(3)
"""


class Stack:
    """What a supervisor does with parts, for one."""

    def __init__(self, folder: Path) -> None:
        self.files = StackFiles(home=folder)
        self.files.make_folders()
        self.stack_id = uuid.uuid4().hex
        self.pause_s = 0.5
        self.findings: list[tuple[str, str, str]] = []
        self.runs: list[PartRun] = []

    def run(self, code: str, *words: str, answers: Callable[[], bool] = lambda: True, **more: Any) -> PartRun:
        command = (sys.executable, "-c", code, *words)
        part = StackPart(name="part", command=command, environment={}, answers=answers, **more)
        add = lambda *finding: self.findings.append(finding)  # noqa: E731
        run = PartRun(part, self.files, stack_id=self.stack_id, pause_s=self.pause_s, add_finding=add)
        run.start()
        self.runs.append(run)
        return run

    def look(self, run: PartRun, condition: Callable[[], bool]) -> None:
        def looked() -> bool:
            run.update()
            return condition()

        until(looked, what=f"{run.phase}, {self.findings}")


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    made = Stack(tmp_path)
    yield made
    part_processes.kill_members(made.stack_id)
    for run in made.runs:
        run.process.wait(LIMIT_S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(part_processes, "time", clock)
    return clock


@pytest.fixture
def hasty(stack: Stack) -> None:
    stack.pause_s = 0.01


def connects(port: int) -> Callable[[], bool]:
    def answers() -> bool:
        try:
            socket.create_connection((LOOPBACK, port), timeout=1).close()
        except OSError:
            return False
        return True

    return answers


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_part_that_was_killed_is_found_and_starts_again(stack: Stack, number: signal.Signals) -> None:
    run = stack.run(SLEEPER)
    stack.look(run, lambda: run.phase == PartPhase.READY)
    first = run.pid
    os.kill(first, number)
    stack.look(run, lambda: run.phase == PartPhase.RESTARTING)
    assert stack.findings == [("part", f"was ended by {number.name}", "restarts after 0.5 s")]
    stack.look(run, lambda: run.phase == PartPhase.READY)
    assert run.pid != first
    assert is_alive(run.pid)
    assert run.state.restarts == 1


def test_pauses_grow_and_a_part_that_never_stays_is_given_up(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    stack.pause_s = 0.02
    monkeypatch.setattr(part_processes, "MAX_PAUSE_S", 0.1)
    run = stack.run("raise SystemExit(7)", answers=lambda: False)
    stack.look(run, lambda: run.phase == PartPhase.GIVEN_UP)
    assert [then for _, _, then in stack.findings[:5]] == [
        "restarts after 0.02 s",
        "restarts after 0.04 s",
        "restarts after 0.08 s",
        "restarts after 0.1 s",
        "restarts after 0.1 s",
    ]
    assert len(stack.findings) == part_processes.MAX_FAILURES
    assert stack.findings[-1][1] == "ended with exit code 7"
    assert "given up after 8 failures in a row" in stack.findings[-1][2]
    assert run.state.restarts == part_processes.MAX_FAILURES - 1
    for _ in range(20):
        run.update()
    assert run.phase == PartPhase.GIVEN_UP
    assert part_processes.stack_mark(stack.stack_id).members() == []


def test_a_part_that_was_well_for_a_while_begins_anew_with_short_pauses(
    stack: Stack, hasty: None, clock: Clock
) -> None:
    run = stack.run(SLEEPER)
    for _ in range(part_processes.MAX_FAILURES + 2):
        stack.look(run, lambda: run.phase == PartPhase.READY)
        clock.ahead_s += part_processes.STEADY_S
        run.update()
        os.kill(run.pid, signal.SIGKILL)
        stack.look(run, lambda: run.phase == PartPhase.RESTARTING)
    assert {then for _, _, then in stack.findings} == {"restarts after 0.01 s"}


def test_an_orphan_that_goes_on_answering_is_ended_before_the_part_starts_again(stack: Stack, hasty: None) -> None:
    port = free_port(18_900)
    run = stack.run(PARENT_OF_A_SERVER, str(port), SERVER, answers=connects(port), port=port)
    stack.look(run, lambda: run.phase == PartPhase.READY)
    (orphan,) = set(part_processes.stack_mark(stack.stack_id).members()) - {run.pid}
    os.kill(run.pid, signal.SIGKILL)
    stack.look(run, lambda: run.phase == PartPhase.RESTARTING)
    assert stack.findings[0][1] == "was ended by SIGKILL and left 1 running, which end now"
    stack.look(run, lambda: run.phase == PartPhase.READY)
    assert not is_alive(orphan)
    assert len(part_processes.stack_mark(stack.stack_id).members()) == 2


def test_an_orphan_that_hears_nothing_is_killed(stack: Stack, hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_processes, "GRACE_S", 0.2)
    run = stack.run(DEAF_ORPHAN)
    stack.look(run, lambda: run.phase == PartPhase.RESTARTING)
    (orphan,) = part_processes.stack_mark(stack.stack_id).members()
    stack.look(run, lambda: run.state.restarts == 1)
    assert not is_alive(orphan)


def test_another_part_s_processes_are_left_alone(stack: Stack, hasty: None) -> None:
    other = part_processes.start(
        StackPart(name="other", command=(sys.executable, "-c", SLEEPER), environment={}, answers=lambda: True),
        stack_id=stack.stack_id,
        log=stack.files.log("other"),
    )
    run = stack.run(SLEEPER)
    stack.look(run, lambda: run.phase == PartPhase.READY)
    os.kill(run.pid, signal.SIGKILL)
    stack.look(run, lambda: run.state.restarts == 1)
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_part_that_stopped_answering_is_left_alone(stack: Stack, hasty: None, clock: Clock) -> None:
    answers = iter([True])
    run = stack.run(SLEEPER, answers=lambda: next(answers, False), patience_s=0.2)
    stack.look(run, lambda: run.phase == PartPhase.READY)
    for _ in range(3):
        clock.ahead_s += 1000.0
        run.update()
    assert (stack.findings, run.phase, run.process.poll()) == ([], PartPhase.READY, None)


@pytest.mark.parametrize("depends", [False, True])
def test_silence_restarts_only_a_part_whose_answer_is_its_own(
    stack: Stack, hasty: None, clock: Clock, depends: bool
) -> None:
    run = stack.run(SLEEPER, answers=lambda: False, patience_s=0.2, depends=depends)
    clock.ahead_s = 1000.0
    run.update()
    assert [what for _, what, _ in stack.findings] == (
        [] if depends else ["did not answer within 0 s; its processes end now"]
    )


def test_a_part_that_cannot_be_started_now_is_tried_again(
    stack: Stack, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stack.run(SLEEPER)
    stack.look(run, lambda: run.phase == PartPhase.READY)
    start = part_processes.start

    def no_process_number(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(part_processes, "start", no_process_number)
    os.kill(run.pid, signal.SIGKILL)
    stack.look(run, lambda: len(stack.findings) == 3)
    assert "could not start: [Errno 11]" in stack.findings[-1][1]
    monkeypatch.setattr(part_processes, "start", start)
    stack.look(run, lambda: run.phase == PartPhase.READY)


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "ended with exit code 0"), (-9, "was ended by SIGKILL"), (-99, "was ended by signal 99")],
)
def test_endings_are_said_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words
