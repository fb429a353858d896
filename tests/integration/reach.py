"""Run probes as trials of one worker: `python -m tests.integration.reach HOME`, which writes `answers.json` there.

The worker's user is that of this process. A test of root starts it as an ordinary user as well.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ablate.experiments.system.isolation import Isolation
from ablate.workers.isolation.environment import environment_with_packages
from ablate.workers.isolation.reach import own_tree_problem
from ablate.workers.lease import Lease, boot_time_s
from ablate.workers.paths import Usage
from ablate.workers.processes.guardian import Guardian
from ablate.workers.processes.runner import TrialRunner
from ablate.workers.processes.wake_event import WakeEvent
from tests.architecture.pages import ROOT
from tests.integration.attacker import order_of, server
from tests.integration.ordinary_user import NOBODY, become_ordinary

KINDS: Mapping[str, Mapping[str, Any]] = {
    "built-in": {},
    "ranks": {"sockets": True, "own_network": True},
    "command": {"sockets": True, "own_network": False, "programs": True},
}
"""Fields of the isolation of a trial of each kind."""
MOST_PROCESSES = 40


def answers_as(home: Path, probes: str, *, ordinary: bool) -> dict[str, Any]:
    """Run the probes as trials of every kind, with and without a file tree of their own; return their answers."""
    (home / "probes.py").write_text(probes)
    if ordinary:
        for path in (home, *home.rglob("*")):
            os.lchown(path, NOBODY, NOBODY)
    command = [sys.executable, "-m", "tests.integration.reach", str(home)]
    begin = become_ordinary if ordinary else None
    environment = {**environment_with_packages(), "HOME": str(home)}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), environment["PYTHONPATH"]))  # of this program
    done = subprocess.run(
        command, cwd=home, env=environment, preexec_fn=begin, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads((home / "answers.json").read_text()))


def main() -> None:
    """Serve as the worker, and as its user's other program with sockets and shared memory."""
    home = Path(sys.argv[1])
    limit = Usage(bytes=32 * 2**20, files=500, processes=MOST_PROCESSES)
    answers: dict[str, Any] = {"tree": own_tree_problem()}
    with (
        Guardian() as guardian,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.create_server(("127.0.0.1", 0)) as network,
        _other_process() as other,
    ):
        named.bind(str(home / "socket"))
        abstract.bind(f"\0ablate-reach-{os.getpid()}")
        named.listen()
        abstract.listen()
        (home / "names").write_text(f"{network.getsockname()[1]} ablate-reach-{os.getpid()} {other}")
        runner = TrialRunner(server(), guardian, WakeEvent(), grace_s=0.2, preempted=lambda: False, most_output=limit)
        for kind, fields in KINDS.items():
            for own_tree in (True, False):
                name = f"{kind}, {'own' if own_tree else 'shared'} tree"
                answers[name] = _answers(runner, home, replace_fields={**fields, "own_tree": own_tree}, name=name)
    (home / "answers.json").write_text(json.dumps(answers))


@contextmanager
def _other_process() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def _answers(runner: TrialRunner, home: Path, *, replace_fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    number = len(list((home / "work" / "att_1").iterdir()))
    order = order_of(home, (home / "probes.py").read_text(), trial_id=f"trl_{number}")
    isolation = order.isolation
    assert isinstance(isolation, Isolation)
    readable = (*isolation.readable, home / "names")
    order = replace(order, isolation=replace(isolation, readable=readable, **replace_fields))
    ending = runner.run(order, Lease(300.0, sent_at=boot_time_s()), timeout_s=100.0)
    answer = order.paths.folder / "answer"
    assert answer.exists(), f"{name}: {order.paths.log.read_text()}"
    return {**json.loads(answer.read_text()), "stopped": str(ending.stopped), "excess": ending.excess}


if __name__ == "__main__":
    main()
