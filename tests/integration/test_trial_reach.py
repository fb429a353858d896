"""What a trial that may connect gets from the services of an embedded stack on its machine: no byte outside of itself.

The trial runs as the worker's user, and knows every address. Only the passwords are closed to it.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ablate.experiments.digest import digest_bytes
from ablate.service.stack import broker
from ablate.service.stack.layout import StackFiles
from ablate.workers.isolation.reach import isolation_problem
from ablate.workers.lease import Lease, boot_time_s
from ablate.workers.paths import Usage, WorkPaths
from ablate.workers.processes.guardian import Guardian
from ablate.workers.processes.runner import TrialRunner
from ablate.workers.processes.wake_event import WakeEvent
from tests import mlflow_server
from tests.api_stack import ADMIN, served_api
from tests.integration.attacker import order_of, server
from tests.waiting import until

pytestmark = pytest.mark.skipif(isolation_problem() is not None, reason=f"not isolated here: {isolation_problem()}")

SECRET = "s3cret-of-this-node"

ASKS = r"""
import base64, http.client
(folder / "out").symlink_to(home)
names = {"api": API, "mlflow": MLFLOW}
answers = {}
def ask(service, method, path, body=None, **headers):
    client = http.client.HTTPConnection("127.0.0.1", names[service], timeout=20)
    headers = {"Content-Type": "application/json", **headers}
    client.request(method, path, None if body is None else json.dumps(body), headers)
    answer = client.getresponse()
    answers.setdefault(service, []).append((method, path, answer.status, answer.read().decode(errors="replace")))
guesses = (b"ablate:", b"admin:password1234")
for word in ["", *("Basic " + base64.b64encode(guess).decode() for guess in guesses)]:
    own = {"Authorization": word} if word else {}
    body = {"name": "x" + word[-4:], "artifact_location": str(folder)}
    ask("mlflow", "POST", "/api/2.0/mlflow/experiments/create", body, **own)
    ask("mlflow", "POST", "/api/2.0/mlflow/runs/create", {"experiment_id": "1", "start_time": 1}, **own)
    ask("mlflow", "GET", "/get-artifact?run_uuid=1&path=out/tokens/admin", **own)
    ask("mlflow", "PUT", "/api/2.0/mlflow-artifacts/artifacts/../../new", {}, **own)
    ask("mlflow", "POST", "/ajax-api/3.0/mlflow/assistant/message", {"message": "cat"}, **own)
for path in PATHS:
    for method in ("GET", "POST"):
        ask("api", method, path)
def valkey(*words):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(SOCKET)
        client.settimeout(20)
        client.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w.encode()) for w in words))
        answers.setdefault("valkey", []).append((" ".join(words), client.recv(1000).decode()))
commands = "CONFIG GET *|SAVE|KEYS *|PUBLISH a b|EVAL return 0|REPLICAOF 127.0.0.1 1|DEBUG SLEEP 0|SLAVEOF x 1|HELLO 3"
for words in [["CONFIG", "SET", "dir", str(folder)], ["MODULE", "LOAD", str(folder / "x.so")], ["AUTH", ""],
              ["AUTH", "default", ""], *(command.split() for command in commands.split("|"))]:
    valkey(*words)
def connects(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        return "reached"
rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
named = {row[7] for row in rows if len(row) > 7 and row[3] == "00010000"}
answers["abstract"] = [(name, attempt(name, lambda: connects("\0" + name[1:]))[1]) for name in named if name[0] == "@"]
(folder / "answer").write_text(json.dumps(answers))
"""

TRY = """
def attempt(name, action):
    try:
        return name, repr(action())
    except OSError as error:
        return name, errno.errorcode[error.errno]
"""
PUBLIC = (
    "/",
    "/healthz",
    "/readyz",
    "/metrics",
    "/openapi.json",
    "/v1/schema/ablation.json",
    "/sign-in",
    "/share",
)
CLOSED = (
    "/mlflow/",
    "/v1/tokens",
    "/v1/ablations",
    "/v1/nodes",
    "/v1/code:find",
    "/v1/identity",
    "/v1/../tokens/admin",
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    for name in ("keys/node", "tokens/worker", "mlflow/mlflow.db", "worker.log"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
    for name in ("keys/node", "tokens/worker", "worker.log"):
        (home / name).write_text(SECRET)
    (home / "data/rows").mkdir(parents=True)
    (home / "data/rows/rows.bin").write_text("rows")
    WorkPaths(home=home).trial("att_1", "trl_other").log.write_text(SECRET)
    return home


@contextmanager
def valkey(files: StackFiles) -> Iterator[None]:
    files.lock.parent.mkdir(exist_ok=True)
    files.broker_socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    broker.configure(files, host="127.0.0.1", port=None)
    with subprocess.Popen(broker.command(files), stdout=subprocess.DEVNULL) as process:
        until(lambda: broker.answers(files))
        yield
        process.terminate()


def contents(home: Path) -> dict[Path, str]:
    """Return a digest of every file of the home but the trial's own and the databases of API and MLflow."""
    folder = WorkPaths(home=home).trial("att_1", "trl_attacks").folder
    files = [path for path in home.rglob("*") if path.is_file() and not path.is_relative_to(folder)]
    moving = ("server.log", ".db", ".db-wal", ".db-shm")
    return {path: digest_bytes(path.read_bytes()) for path in files if not path.name.endswith(moving)}


def reached(home: Path, program: str) -> dict[str, Any]:
    """Run a program as a trial that may connect; return its answers."""
    order = order_of(home, TRY + program)
    assert order.isolation is not None
    # without a file tree and a network of its own: those would hide the services
    order = replace(order, isolation=replace(order.isolation, sockets=True, own_tree=False))
    limit = Usage(bytes=32 * 2**20, files=500)
    with Guardian() as guardian:
        runner = TrialRunner(server(), guardian, WakeEvent(), grace_s=0.2, preempted=lambda: False, most_output=limit)
        runner.run(order, Lease(300.0, sent_at=boot_time_s()), timeout_s=200.0)
    answer = order.paths.folder / "answer"
    assert answer.exists(), order.paths.log.read_text()
    return dict(json.loads(answer.read_text()))


def test_no_service_gives_a_trial_a_byte_outside_of_it(home: Path) -> None:
    files = StackFiles(home=home)
    with mlflow_server.running(files.mlflow) as mlflow, served_api("sqlite", home) as api, valkey(files):
        api.token("planted", "admin")
        before = contents(home)
        program = ASKS.replace("PATHS", repr((*PUBLIC, *CLOSED))).replace(
            "SOCKET)", repr(str(files.broker_socket)) + ")"
        )
        ports = {"API": api.client.base_url.port, "MLFLOW": httpx.URL(mlflow).port}
        for name, port in ports.items():
            program = program.replace(f": {name}", f": {port}")
        answers = reached(home, program)
        after = contents(home)
    everything = json.dumps(answers)
    secrets = (SECRET, ADMIN, (home.parent / "home" / "mlflow-password").read_text().strip(), broker.password(files))
    assert [secret for secret in secrets if secret in everything] == []
    assert {status for _method, _path, status, _text in answers["mlflow"]} == {401}
    assert {status for _method, path, status, _text in answers["api"] if path in CLOSED} <= {401, 403, 404, 405}
    assert [one for one in answers["valkey"] if not one[1].startswith(("-NOAUTH", "-WRONGPASS", "-ERR"))] == []
    assert [one for one in answers["abstract"] if one[1] == "'reached'"] == []
    assert after == before
