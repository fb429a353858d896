"""Secrets that were planted in a real stack, and searched for in all that it left and said after a real ablation.

The stack is open to other machines, so its broker has a port and a password.
"""

import base64
import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import httpx
import psutil
import pytest
from redis import AuthenticationError, Redis

from ablate.experiments.system.wake import celery_app, wake_subscription
from ablate.service.stack import part_processes
from tests.acceptance.test_stack import EXACT, Home
from tests.receiver import Receiver, receiving
from tests.waiting import LIMIT_S, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OF_THE_SHELL = "pl4nted-in-the-shell-88"
"""In variables of other programs, and in the address of the webhook."""
MAY_HOLD = ("tokens", "keys")
"""Folders below a home that are there to hold secrets."""


def test_no_secret_of_an_open_stack_is_in_any_log_event_receipt_tag_page_or_answer(tmp_path: Path) -> None:
    with receiving() as receiver:
        _search(Home(tmp_path / "home"), tmp_path / "smallest.yaml", receiver)


def _search(home: Home, spec: Path, receiver: Receiver) -> None:
    webhook = base64.b64encode(os.urandom(32)).decode()
    home.environment |= {
        "ABLATE_WEBHOOK_URL": f"{receiver.url}?key={OF_THE_SHELL}",
        "ABLATE_WEBHOOK_SECRET": f" whsec_{webhook}\r\n",
        "ABLATE_HOST": "0.0.0.0",  # noqa: S104
        "ABLATE_GATEWAY": "true",  # as if there were one
        **dict.fromkeys(("MLFLOW_TRACKING_PASSWORD", "PGPASSWORD", "REDISCLI_AUTH"), OF_THE_SHELL),
    }
    spec.write_text(EXACT)
    try:
        stack = home.up()
        planted = {name: (home.files.home / "tokens" / name).read_text().strip() for name in ("admin", "worker")}
        planted |= {"shell": OF_THE_SHELL, "webhook": webhook, "key": _key_of(home.files.home / "keys" / "node")}
        planted["broker"] = home.files.broker_password.read_text().strip()
        planted["mlflow"] = home.files.mlflow_password.read_text().strip()
        for name, command in (
            ("ada", "admin tokens create ada --scope submit"),
            ("gpu-7", "nodes add gpu-7 --class h200"),
        ):
            planted[name] = json.loads(home.run(*command.split(), "--json").stdout)["secret"]
        home.environment["ABLATE_TOKEN"] = planted["ada"]
        with _watching_trials(stack["stack_id"]) as environments:
            ran = home.run("run", str(spec))
        assert ran.returncode in range(5), ran.stderr
        until(lambda: _is_projected(stack["api_url"], planted["admin"]))
        outputs = [ran.stdout, ran.stderr, *_refusals(stack["api_url"], planted)]
        del home.environment["ABLATE_TOKEN"]
        with sqlite3.connect(f"file:{home.files.home / 'ablate.db'}?mode=ro", uri=True) as database:
            attempts = dict(database.execute("SELECT id, token FROM attempts").fetchall())
            stored = _rows(database)
        assert len(attempts) >= 2
        planted |= {f"fencing token of {attempt}": token for attempt, token in attempts.items()}
        outputs += [stored, *_answers(stack["api_url"], planted["admin"]), *_commands(home)]
        command_lines = [
            " ".join(psutil.Process(pid).cmdline()) for pid in part_processes.stack_mark(stack["stack_id"]).members()
        ]
        _another_machine_needs_the_password(home, stack["broker_port"], planted["broker"], spec)
    finally:
        home.run("down")
    assert receiver.got, "the webhook was sent"
    private = [path for path in home.files.home.rglob("*") if path.is_file() and not _is_searched(home, path)]
    assert [path for path in private if path.stat().st_mode & 0o077] == []
    left = {
        path: path.read_bytes() for path in home.files.home.rglob("*") if path.is_file() and _is_searched(home, path)
    }
    assert {"api.log", "worker.log", "background.log", "mlflow.db"} <= {path.name for path in left}
    assert environments, "the fork server was seen"
    everything = {
        **{str(path): data for path, data in left.items()},
        "command lines": "\n".join(command_lines).encode(),
        **{f"environment {number}": one.encode() for number, one in enumerate(environments)},
        **{f"answer {number}": text.encode() for number, text in enumerate(outputs)},
        **{f"webhook {number}": str(got).encode() for number, got in enumerate(receiver.got)},
    }
    leaks = [
        (name, where)
        for where, data in everything.items()
        for name, secret in planted.items()
        if secret.encode() in data and (name, where.split()[0]) not in _may_hold(home)
    ]
    fencing = [(name, where) for name, where in leaks if name.startswith("fencing") and "ablate.db" in where]
    assert [leak for leak in leaks if leak not in fencing] == []
    assert fencing, "the search finds what is there: the database holds the tokens of attempts"


PLANTED = "hf_Pl4nted0nTheN0de/forOnePr0gram+Only"
PRINTS = """
import base64, json, os, sys, time, urllib.parse
import ablate
token = os.environ["HF_TOKEN"]
print("token", token)
sys.stderr.write("HF_TOKEN=" + token + chr(10))
print(json.dumps({"headers": "Bearer " + token}), urllib.parse.quote(token, safe=""))
print(base64.b64encode(f"ada:{token}".encode()).decode())
for part in (token[:11], token[11:]):
    print(part, end="", flush=True)
    time.sleep(1.2)
print()
with ablate.trial(seed=int(sys.argv[1])) as trial:
    for step in trial.steps(3):
        step.report(loss=1.0, tokens=10)
    trial.report(val=1.0 + trial.seed / 100, **{token: 2.0})
    if sys.argv[-1] == "fails":
        raise ValueError("x" * 1000 + token + " is refused")
    if sys.argv[-1] == "exits":
        trial.__exit__(None, None, None)
        sys.exit("401 for " + token)
"""


def test_no_secret_of_a_program_is_in_anything_that_the_stack_keeps_or_serves(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    code = tmp_path / "code"
    code.mkdir()
    code.joinpath("train.py").write_text(PRINTS)
    store = tmp_path / "of-the-operator"
    store.write_text(f"HF_TOKEN={PLANTED}\n")
    store.chmod(0o600)
    home.environment |= {"ABLATE_SECRETS": str(store), "ABLATE_QUIET_S": "0", "ABLATE_CONTROL_EVERY": "0"}
    spec = tmp_path / "mine.json"
    spec.write_text(json.dumps(_with_a_secret(code)))
    try:
        stack = home.up()
        admin = (home.files.home / "tokens" / "admin").read_text().strip()
        ran = home.run("run", str(spec))
        assert ran.returncode in range(5), ran.stderr
        until(lambda: _is_projected(stack["api_url"], admin))
        link = json.loads(home.run("share", "latest", "--json").stdout)["url"]
        texts = [ran.stdout, ran.stderr, httpx.get(link, trust_env=False).text, *_answers(stack["api_url"], admin)]
        texts += [*_commands(home), home.run("verdict", "latest", "--explain").stdout]
        texts += [
            home.run(*words, "latest/1/baseline").stdout for words in (["log"], ["offline", "receipts", "--json"])
        ]
        texts += [home.run("verdict", "latest", "--markdown").stdout]
        home.run("plan", str(spec), "--out", str(tmp_path / "plan.tar"))
    finally:
        home.run("down")
    executed = home.run(
        "offline", "exec", str(tmp_path / "plan.tar"), "--out", str(tmp_path / "bundle"), "--blocks", "1"
    )
    assert executed.returncode == 0, executed.stderr
    texts += [executed.stdout, executed.stderr]
    assert "HF_TOKEN" in "".join(_commands_about(texts)), "the doctor lists the names"
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path != store}
    assert {"ablate.db", "mlflow.db", "plan.tar", "worker.log"} <= {path.name for path in files}
    everything = {**{str(path): data for path, data in files.items()}, **dict(enumerate(map(str.encode, texts)))}
    pieces = [PLANTED[start : start + 12].encode() for start in range(len(PLANTED) - 11)]
    pieces += [base64.b64encode(f"ada:{PLANTED}".encode())[8:40], quote(PLANTED, safe="").encode()]
    assert [(where, piece) for where, data in everything.items() for piece in pieces if piece in data] == []
    masked = [str(where) for where, data in everything.items() if b"[HF_TOKEN]" in data]
    assert any("ablate.db" in where for where in masked)
    assert any("bundle" in where for where in masked)


def _commands_about(texts: list[str]) -> list[str]:
    return [text for text in texts if "of-the-operator" in text]


def _with_a_secret(code: Path) -> dict[str, object]:
    return {
        "ablation": "secret",
        "question": "Does a program keep its secret?",
        "workload": {
            "command": ["python", "train.py", "{seed}"],
            "code": str(code),
            "steps": {"warmup": 1, "timed": 2},
            "secrets": ["HF_TOKEN"],
            "metrics": {"val": {"better": "lower"}},
        },
        "variants": {name: {"args": [name]} for name in ("same", "fails", "exits")},
        "design": {"seeds": [1, 2, 3, 4, 5, 6], "blocks": {"count": 6}},
        "placement": {"node_class": "cpu", "max_foreign_load": "99%"},
        "verdict": {"primary": {"metric": "val", "margin": "5%", "adopt_if": "10%"}},
    }


def _may_hold(home: Home) -> set[tuple[str, str]]:
    """Return secrets with the places that have to hold them."""
    broker = {("broker", str(file)) for file in (home.files.broker_password, home.files.broker_config)}
    return {("shell", "webhook"), *broker}


def _another_machine_needs_the_password(home: Home, port: int, password: str, spec: Path) -> None:
    with pytest.raises(AuthenticationError):
        Redis(port=port).ping()
    with pytest.raises(AuthenticationError):
        Redis(port=port, password="wrong").ping()
    assert Redis(port=port, password=password).ping()
    assert hears_a_submission(home, f"redis://:{password}@127.0.0.1:{port}/0", spec)


def hears_a_submission(home: Home, broker_url: str, spec: Path) -> bool:
    """Listen as a worker of class cpu on another machine does, and submit."""
    heard: list[object] = []
    with celery_app(broker_url, name="elsewhere").connection_for_read() as connection:
        queue = wake_subscription("cpu")
        with connection.Consumer([queue], callbacks=[lambda body, _message: heard.append(body)], accept=["json"]):

            def hears() -> bool:
                with suppress(TimeoutError):
                    connection.drain_events(timeout=0.5)
                return bool(heard)

            hears()  # it subscribes when it first waits
            assert home.run("run", str(spec), "--detach").returncode == 0
            return bool(until(hears))


@contextmanager
def _watching_trials(stack_id: str) -> Iterator[set[str]]:
    """Collect the environments of the fork server and of every trial, as the kernel shows them."""
    seen: set[str] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            for pid in part_processes.part_mark(stack_id, "worker").members():
                with suppress(psutil.Error):
                    process = psutil.Process(pid)
                    if "forkserver" in " ".join(process.cmdline()):
                        seen.add(str(sorted(process.environ().items())))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _key_of(path: Path) -> str:
    """The private key's base64 line."""
    return max(path.read_text().splitlines(), key=len) if "PRIVATE" in path.read_text() else path.read_text()


def _is_searched(home: Home, path: Path) -> bool:
    return path.relative_to(home.files.home).parts[0] not in MAY_HOLD


def _rows(database: sqlite3.Connection) -> str:
    """Every value of every table but the tokens of attempts."""
    names = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    texts = []
    for name in names:
        rows = database.execute(f'SELECT * FROM "{name}"')  # noqa: S608 - names of our own tables
        columns = [column[0] for column in rows.description]
        texts += [
            f"{name}.{column}: {value!r}"
            for row in rows
            for column, value in zip(columns, row, strict=True)
            if (name, column) != ("attempts", "token")
        ]
    return "\n".join(texts)


def _refusals(url: str, planted: dict[str, str]) -> list[str]:
    """What the service says to requests that are wrong and carry secrets."""
    bearer = {"Authorization": f"Bearer {planted['admin']}"}
    asked = [
        httpx.get(f"{url}/v1/identity", headers={"Authorization": f"Bearer {planted['admin']}x"}, trust_env=False),
        httpx.post(f"{url}/v1/ablations", headers=bearer, content=b"{", trust_env=False),
        httpx.post(f"{url}/v1/blocks:claim", headers=bearer, json={"node_id": "x"}, trust_env=False),
        httpx.get(f"{url}/nowhere", headers=bearer, trust_env=False),
    ]
    assert [answer.status_code for answer in asked] == [401, 415, 403, 404]
    return [answer.text + str(answer.headers) for answer in asked]


def _is_projected(url: str, admin: str) -> bool:
    """Report and MLflow runs are made last."""
    answer = httpx.get(f"{url}/v1/ablations", headers={"Authorization": f"Bearer {admin}"}, trust_env=False)
    return answer.json()["items"][0]["mlflow_url"] is not None


def _answers(url: str, admin: str) -> list[str]:
    """Every answer to a GET, for the newest ablation and all of its trials."""
    with httpx.Client(
        base_url=url, headers={"Authorization": f"Bearer {admin}"}, trust_env=False, timeout=LIMIT_S
    ) as http:
        ablation = http.get("/v1/ablations").json()["items"][0]["links"]["self"]
        paths = [
            "/v1/tokens",
            "/v1/nodes",
            "/v1/keys",
            "/v1/identity",
            "/v1/calibrations",
            "/metrics",
            "/readyz",
            "/version",
        ]
        paths += [
            ablation,
            *(f"{ablation}/{part}" for part in ("blocks", "trials", "verdict", "report", "events", "spec")),
        ]
        for trial in http.get(f"{ablation}/trials?limit=500").json()["items"]:
            paths += [f"/v1/trials/{trial['id']}/receipt", f"/v1/trials/{trial['id']}/log"]
        answers = [http.get(path) for path in paths]
    assert {answer.status_code for answer in answers} == {200}
    return [answer.text for answer in answers]


def _commands(home: Home) -> list[str]:
    """What the commands print about tokens, nodes and the stack."""
    asked = (
        ["admin", "tokens", "list"],
        ["admin", "tokens", "list", "--json"],
        ["nodes"],
        ["nodes", "--json"],
        ["status", "--json"],
        ["list"],
    )
    done = [home.run(*words) for words in (*asked, ["worker", "doctor"])]
    return [one.stdout + one.stderr for one in done]
