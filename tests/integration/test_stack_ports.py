"""Two stacks that start at once find the same port free, and one of them gets it."""

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from ablate.service.errors import PortTaken
from ablate.service.stack import part_processes, supervisor
from ablate.service.stack.layout import StackFiles
from ablate.service.stack.parts import LOOPBACK, Addresses, StackPart, free_port, is_ok, listeners
from tests.waiting import LIMIT_S

SLEEPER = ("-c", "import time; time.sleep(600)")


class Healthy(BaseHTTPRequestHandler):
    """Answers as another stack's MLflow does."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def foreign_port() -> Iterator[int]:
    server = HTTPServer((LOOPBACK, 0), Healthy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[supervisor._Supervisor]:
    files = StackFiles(home=tmp_path)
    files.make_folders()
    where = Addresses(files=files, api_port=1, mlflow_port=2)
    monkeypatch.setattr(supervisor, "_choose_ports", lambda _files, _report: where)
    one = supervisor._Supervisor(files, lambda _kind, _text: None, with_worker=True)
    yield one
    part_processes.end([run.process for run in one._runs.values()], patience_s=LIMIT_S)
    assert part_processes.stack_mark(one._state.stack_id).members() == []


def part(command: tuple[str, ...], port: int) -> StackPart:
    return StackPart(
        name="mlflow",
        command=(sys.executable, *command),
        environment={},
        answers=lambda: is_ok(f"http://{LOOPBACK}:{port}", "/"),
        patience_s=LIMIT_S,
        port=port,
    )


def test_answer_of_another_process_does_not_make_a_part_ready(made: supervisor._Supervisor, foreign_port: int) -> None:
    slow = part(SLEEPER, foreign_port)
    made._launch(slow)
    with pytest.raises(PortTaken, match=f"cannot use port {foreign_port}: another process took it"):
        made._wait(slow)


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_a_stack_that_lost_its_ports_starts_again_up_to_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    starts = 0

    def supervise(*_files: object, **_options: object) -> None:
        nonlocal starts
        starts += 1
        if starts <= lost:
            raise PortTaken("api", "cannot use port 8321", "")

    monkeypatch.setattr(supervisor, "supervise", supervise)
    if lost == 3:
        with pytest.raises(PortTaken):
            supervisor._supervise_somewhere(StackFiles(home=tmp_path), with_worker=True)
    else:
        supervisor._supervise_somewhere(StackFiles(home=tmp_path), with_worker=True)
    assert starts == min(3, lost + 1)


def test_answer_of_its_own_process_does(made: supervisor._Supervisor) -> None:
    port = free_port(18700)
    server = part(("-m", "http.server", "--bind", LOOPBACK, str(port)), port)
    made._launch(server)
    made._wait(server)
    assert listeners(port) == set(part_processes.stack_mark(made._state.stack_id).members())


def test_nobody_listens_on_a_free_port() -> None:
    assert listeners(free_port(18800)) == set()
