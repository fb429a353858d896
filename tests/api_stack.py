"""The real API in this process on a real database, and a worker's side of the protocol, for tests of the service."""

import atexit
import itertools
import json
import socket
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient
from pydantic import ValidationError
from sqlalchemy import create_engine, make_url, text

from ablate.experiments.design.plan import Plan
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.records.identity import BlockReport, ClaimedBlock
from ablate.experiments.records.signing import Signer
from ablate.service.app import create_app
from ablate.service.settings import ServiceSettings
from ablate.service.store.migrate import upgrade
from ablate.service.store.session import Store
from tests.factories import make_plan, make_receipt, spec_values
from tests.waiting import LIMIT_S, until
from tests.watched_postgres import end_with_this_process

ADMIN, WORKER = "admin-secret-of-the-tests", "worker-secret-of-the-tests"
NODE = "tester"
"""The node whose key the settings hold."""
BOTH = ("sqlite", "postgresql")
SIGNER = Signer(bytes(range(32)))
"""The key of every node of the tests."""
_numbers = itertools.count()


@lru_cache(maxsize=1)
def _postgres() -> Any:
    if find_spec("pgserver") is None:
        pytest.skip("the wheel pgserver has no PostgreSQL for this Python or machine (Python 3.13, ARM)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks for a runtime folder of a desktop session when it is imported
        from pgserver import get_server, postgres_server
    pg_ctl = postgres_server.pg_ctl

    def patient(arguments: list[str], **options: Any) -> Any:
        return pg_ctl(arguments, **{**options, "timeout": LIMIT_S})

    folder = Path(tempfile.mkdtemp(prefix="ablate-pg-")).resolve()
    end_with_this_process(folder)
    with mock.patch.object(postgres_server, "pg_ctl", patient):  # it would give up after 10 s and leave a server behind
        server = get_server(folder, cleanup_mode=None)
    for setting in ("fsync", "full_page_writes", "synchronous_commit"):  # the data need not survive a power failure
        server.psql(f"ALTER SYSTEM SET {setting} = off")
    server.psql("SELECT pg_reload_conf()")
    return server


@lru_cache(maxsize=1)
def _mute_socket() -> socket.socket:
    mute = socket.socket()
    atexit.register(mute.close)
    mute.bind(("127.0.0.1", 0))  # never listens: whoever connects is refused, and nobody else is given the port
    return mute


def nobody_url() -> str:
    """Return an HTTP address on loopback where nobody listens while this process lives."""
    return f"http://127.0.0.1:{_mute_socket().getsockname()[1]}"


def database_url(kind: str, folder: Path) -> str:
    """Return the URL of a fresh, empty database of `kind`: sqlite or postgresql."""
    if kind == "sqlite":
        return f"sqlite:///{folder / f'{next(_numbers)}.db'}"
    return _postgres_database("template1")


def _migrated(url: str) -> str:
    """Bring an empty database to the newest schema; return its name or file."""
    store = Store(url)
    upgrade(store)
    store.close()
    return str(make_url(url).database)


@lru_cache
def _postgres_template() -> str:
    return _migrated(_postgres_database("template1"))


@lru_cache
def _sqlite_template() -> bytes:
    with tempfile.TemporaryDirectory(prefix="ablate-schema-") as folder:
        return Path(_migrated(database_url("sqlite", Path(folder)))).read_bytes()


def migrated_url(kind: str, folder: Path) -> str:
    """Return the URL of a fresh database of `kind` with the newest schema."""
    if kind == "postgresql":
        return _postgres_database(_postgres_template())
    folder.mkdir(parents=True, exist_ok=True)
    url = database_url(kind, folder)
    Path(str(make_url(url).database)).write_bytes(_sqlite_template())
    return url


def _postgres_database(template: str) -> str:
    uri = _postgres().get_uri().replace("postgresql://", "postgresql+psycopg://")
    name = f"ablate_{next(_numbers)}"
    engine = create_engine(uri, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    engine.dispose()
    return uri.replace("/postgres?", f"/{name}?")


def settings_for(url: str, home: Path, **changes: Any) -> ServiceSettings:
    """Return settings for tests; there is no broker and no MLflow unless named."""
    secrets = {"admin_token": ADMIN, "worker_token": WORKER, "node_name": NODE}
    values: dict[str, Any] = {"home": home, "database_url": url, **secrets}
    return ServiceSettings(**{"mlflow_url": nobody_url(), **values, **changes})


def bearer(secret: str) -> dict[str, str]:
    """Return the header that shows a secret."""
    return {"Authorization": f"Bearer {secret}"}


class Api:
    """Calls of people (`admin`) and of workers, each with the key of its node."""

    def __init__(self, client: httpx.Client, store: Store) -> None:
        self.client = client
        self.store = store
        self.admin = bearer(ADMIN)
        self.worker = bearer(WORKER)
        """The key of node `tester`, which the settings name."""
        self._keys = {NODE: self.worker}
        self._names: dict[str, str] = {}
        """Of registered nodes, by id."""
        self._holders: dict[str, str] = {}
        """Names of the nodes that claimed, by attempt."""

    def worker_of(self, name: str) -> dict[str, str]:
        """Return the headers of the worker of node `name`; its key is issued, or replaced, at the first call."""
        if name not in self._keys:
            answer = self.client.post("/v1/nodes", headers=self.admin, json={"name": name})
            if answer.status_code == 409:
                answer = self.client.post(f"/v1/nodes/{name}:rotate-key", headers=self.admin, json={})
            assert answer.is_success, answer.text
            self._keys[name] = bearer(answer.json()["secret"])
        return self._keys[name]

    def token(self, name: str, scope: str, **limits: Any) -> dict[str, str]:
        """Create a token and return its headers."""
        answer = self.client.post("/v1/tokens", headers=self.admin, json={"name": name, "scope": scope, **limits})
        assert answer.status_code == 201, answer.text
        return bearer(answer.json()["secret"])

    def get(self, path: str, **options: Any) -> httpx.Response:
        headers = {**self.admin, **options.pop("headers", {})}
        return self.client.get(path, headers=headers, **options)

    def submit(self, *, key: str | None = None, **changes: Any) -> dict[str, Any]:
        answer = self.post_spec(spec_values(**changes), key=key)
        assert answer.status_code == 202, answer.text
        return dict(answer.json())

    def post_spec(self, values: dict[str, Any], *, key: str | None = None) -> httpx.Response:
        headers = {**self.admin, "Idempotency-Key": key or f"key-{next(_numbers)}"}
        return self.client.post("/v1/ablations", json=values, headers=headers)

    def cancel(self, ablation_id: str) -> httpx.Response:
        return self.client.post(f"/v1/ablations/{ablation_id}:cancel", headers=self.admin)

    def register(self, name: str = "node-a", node_class: str = "cpu", *, devices: int = 64, **more: Any) -> str:
        body = {
            "node_class": node_class,
            "devices": [{"index": number, "name": "test", "memory_bytes": 1} for number in range(devices)],
            "versions": {"torch": "2"},
            "code_digest": "sha256:c",
            "public_key": SIGNER.key,
            **more,
        }
        answer = self.put_node(name, body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["node_id"])

    def put_node(self, name: str, body: dict[str, Any]) -> httpx.Response:
        """Register with the key of the node."""
        answer = self.client.put(f"/v1/nodes/{name}", headers=self.worker_of(name), json=body)
        if answer.is_success:
            self._names[answer.json()["node_id"]] = name
        return answer

    def claim(self, node_id: str, **more: Any) -> dict[str, Any] | None:
        name = self._names.get(node_id, NODE)
        body = {"node_id": node_id, **more}
        answer = self.client.post("/v1/blocks:claim", headers=self.worker_of(name), json=body)
        assert answer.status_code in (200, 204), answer.text
        if answer.status_code == 204:
            return None
        self._holders[answer.json()["attempt_id"]] = name
        return dict(answer.json())

    def claimed(self, node_id: str, **more: Any) -> dict[str, Any]:
        """Claim the next block, which is there."""
        block = self.claim(node_id, **more)
        assert block is not None
        return block

    def attempt(self, block: dict[str, Any], verb: str, **body: Any) -> httpx.Response:
        message = {"token": block["token"], **body}
        if verb == "report":
            message = signed(block, message)
        path = f"/v1/attempts/{block['attempt_id']}:{verb}"
        headers = self.worker_of(self._holders.get(block["attempt_id"], NODE))
        return self.client.post(path, headers=headers, json=message)

    def events(self, ablation_id: str) -> list[tuple[str, dict[str, Any]]]:
        """The stored events; for ablations whose stream ends."""
        return parse_events(self.get(f"/v1/ablations/{ablation_id}/events").text)

    def finish(self, node_id: str, **changes: Any) -> int:
        """Claim and report every block that waits; return how many."""
        count = 0
        while block := self.claim(node_id):
            answer = self.attempt(block, "report", receipts=receipts_of(block, node_id, **changes))
            assert answer.status_code == 200, answer.text
            count += 1
        return count


def signed(block: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """Return a report with the signature of the tests' node; what is no report stays as it is."""
    try:
        statement = BlockReport.model_validate(message).statement(ClaimedBlock.model_validate(block))
    except ValidationError:
        return message
    return {"signature": SIGNER.sign(statement).model_dump(), **message}


def receipts_of(
    block: dict[str, Any], node_id: str, *, changed: dict[str, dict[str, Any]] | None = None, **changes: Any
) -> list[dict[str, Any]]:
    """Sealed receipts of a claimed block of the factories' spec; `changed` by arm, as in make_receipt."""
    plan: Plan = make_plan(AblationSpec.model_validate(spec_values(**changes)))
    receipts = []
    for trial in block["trials"]:
        ids = {
            "ablation": block["ablation_id"],
            "block": block["block_id"],
            "trial": trial["trial_id"],
            "attempt": block["attempt_id"],
            "node": node_id,
        }
        receipt = make_receipt(
            plan, block["block_index"], trial["arm"], ids=ids, **(changed or {}).get(trial["arm"], {})
        )
        receipts.append(receipt.model_dump(mode="json"))
    return receipts


def parse_events(body: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse a finished stream of server-sent events into (name, data)."""
    events = []
    for block in body.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":") and ": " in line)
        if "event" in fields:
            events.append((fields["event"], json.loads(fields["data"])))
    return events


@contextmanager
def running_api(kind: str, folder: Path, **changes: Any) -> Iterator[Api]:
    """Run the API on a fresh, migrated database of `kind`."""
    settings = settings_for(migrated_url(kind, folder), folder / "home", **changes)
    store = Store(settings.sqlalchemy_url)
    with TestClient(create_app(settings, store), raise_server_exceptions=False) as client:
        yield Api(client, store)


@contextmanager
def served_api(kind: str, folder: Path, **changes: Any) -> Iterator[Api]:
    """Run the API behind a real HTTP server in a thread of this process."""
    settings = settings_for(migrated_url(kind, folder), folder / "home", **changes)
    store = Store(settings.sqlalchemy_url)
    config = uvicorn.Config(
        create_app(settings, store),
        host="127.0.0.1",
        port=0,
        http="httptools",
        ws="none",
        log_config=None,
        access_log=False,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started or not thread.is_alive())
    assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=LIMIT_S) as client:
            yield Api(client, store)
    finally:
        server.should_exit = True
        thread.join()


def api_fixture(
    run: Callable[..., AbstractContextManager[Api]] = running_api,
    *,
    kinds: Sequence[str] = BOTH,
    scope: Literal["function", "module"] = "function",
    **changes: Any,
) -> Any:
    """Return a fixture of an API; its tests run on each of `kinds` of databases."""

    @pytest.fixture(scope=scope, params=kinds)
    def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
        with run(request.param, tmp_path_factory.mktemp("api"), **changes) as running:
            yield running

    return api
