"""Worlds with work in progress, and the operations that clients and the background process do in them."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Connection, Table, create_engine, delete, event, insert, select, text, update

from ablate.experiments.digest import digest_bytes
from ablate.service.background.main import Retention
from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.background.reconciler import Reconciler
from ablate.service.lifecycle import OutboxKind
from ablate.service.store.files.code_archives import drop_oldest
from ablate.service.store.files.logs import drop_logs
from ablate.service.store.tables import ablations, blocks, code_archives, db_now, metadata, nodes, outbox
from tests.api_stack import Api, receipts_of, running_api
from tests.bundles import archive_of, make_bundle, make_file
from tests.chaos.ledger import Ledger
from tests.factories import command_values, spec_values
from tests.projectors import projector

EXACT: dict[str, Any] = {"design__seeds": [1], "verdict": {"primary": {"metric": "peak_allocated_gib", "margin": "1%"}}}
TWO: dict[str, Any] = {**EXACT, "design__blocks": {"count": 2}}
LOOKS: dict[str, Any] = {**EXACT, "design__blocks": {"looks": [6, 7]}}
CODE = b"an archive, which the service never unpacks"
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
_CHANGED = re.compile(r"\b(?:INSERT INTO|UPDATE|DELETE FROM)\s+\"?(\w+)")
Answer = tuple[Any, ...]
"""Status of an answer and its fields that a client acts on."""


@dataclass
class World:
    """One state of a service, which `restore` brings back."""

    name: str
    api: Api
    ablation: str = ""
    shape: dict[str, Any] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)
    claimed: list[dict[str, Any]] = field(default_factory=list)
    """Blocks by claim, the oldest first; the first node claimed them."""
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    """Tables with statements since `keep` or `restore`."""
    archive: bytes = b""
    """A bundle of another ablation."""
    watcher: Any = None
    """An engine whose statements nobody stops."""

    def watch(self) -> None:
        """Note the tables that statements change."""

        def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
            self.changed.update(_CHANGED.findall(statement))

        event.listen(self.api.store.writer, "before_cursor_execute", note)

    def keep(self) -> None:
        """Store the rows of all tables for `restore`, without wake-ups: a tick drops those older than ten seconds."""
        self.change(delete(outbox).where(outbox.c.kind == OutboxKind.WAKE))
        with self.api.store.read() as connection:
            self.rows = {table.name: _rows(connection, table) for table in metadata.sorted_tables}
        self.changed.clear()

    def restore(self) -> None:
        """Bring every row back; ids stay the same."""
        tables = [table for table in metadata.sorted_tables if table.name in self.changed]
        with self.api.store.write() as connection:
            connection.execute(text("SET LOCAL session_replication_role = replica"))  # foreign keys may wait
            for table in tables:
                connection.execute(delete(table))
                if self.rows[table.name]:
                    connection.execute(insert(table), self.rows[table.name])
                for column in (column for column in table.columns if column.autoincrement is True):
                    sequence = f"pg_get_serial_sequence('{table.name}', '{column.name}')"
                    last = f'(SELECT max("{column.name}") FROM "{table.name}")'  # noqa: S608 - our own names
                    connection.execute(text(f"SELECT setval({sequence}, coalesce({last}, 0) + 1, false)"))
            connection.execute(update(nodes).values(seen_at=db_now()))  # both ask for work all the time
        self.changed.clear()
        self.api.client.app.state.services.authenticator.forget()  # type: ignore[attr-defined]

    def change(self, statement: Any) -> None:
        """Execute a statement that no client could send, such as one that lets time pass."""
        with self.api.store.write() as connection:
            connection.execute(statement)

    def claim(self) -> None:
        """Let the first node claim the next block."""
        block = self.api.claimed(self.nodes[0], claim_id=f"{len(self.claimed):022d}")
        self.claimed.append(block)

    def report(self, number: int = -1) -> httpx.Response:
        """Report a claimed block."""
        block = self.claimed[number]
        receipts = receipts_of(block, self.nodes[0], **self.shape)
        return self.api.attempt(block, "report", receipts=receipts)

    def lapse(self) -> None:
        """Let the leases of running blocks run out."""
        self.change(update(blocks).where(blocks.c.state == "running").values(lease_until=db_now() - 1))


def _rows(connection: Connection, table: Table) -> list[dict[str, Any]]:
    return [dict(row._mapping) for row in connection.execute(select(table))]


def _running(world: World) -> None:
    """One of two blocks runs, the other waits."""
    world.claim()


def _both(world: World) -> None:
    """Both blocks run."""
    world.claim()
    world.claim()


def _lapsed(world: World) -> None:
    """The lease of a running block has run out."""
    world.claim()
    world.lapse()


def _expired(world: World) -> None:
    """An expired block waits again."""
    _lapsed(world)
    assert Reconciler(world.api.store).expire_leases() == 1
    world.change(update(blocks).values(not_before=0.0, avoid_node_id=None))


def _last(world: World) -> None:
    """The last block runs."""
    world.claim()
    assert world.report().status_code == 200
    world.claim()


def _last_lapsed(world: World) -> None:
    """The last block runs, and its lease has run out."""
    _last(world)
    world.lapse()


def _cancelling(world: World) -> None:
    """The ablation is being cancelled while a block runs."""
    world.claim()
    assert world.api.cancel(world.ablation).status_code == 202


def _spent(world: World) -> None:
    """The budget is used up by the block that runs."""
    world.claim()
    world.change(update(ablations).values(device_s=HOUR_S * 1000))


def _look(world: World) -> None:
    """A look is due."""
    for _ in range(6):
        world.claim()
        assert world.report().status_code == 200


def _ended(world: World) -> None:
    """The ablation ended long ago, and its verdict is due; trials have logs."""
    world.claim()
    assert _heartbeat(world)[0] == 200
    assert world.report().status_code == 200
    world.claim()
    assert world.report().status_code == 200
    world.change(update(ablations).values(finished_at=db_now() - 100 * DAY_S))


WORLDS: dict[str, tuple[Callable[[World], None], dict[str, Any]]] = {
    "running": (_running, TWO),
    "both running": (_both, TWO),
    "lapsed": (_lapsed, TWO),
    "expired": (_expired, TWO),
    "last": (_last, TWO),
    "last lapsed": (_last_lapsed, TWO),
    "cancelling": (_cancelling, TWO),
    "spent": (_spent, TWO),
    "look": (_look, LOOKS),
    "ended": (_ended, TWO),
}


@contextmanager
def world(name: str, folder: Path) -> Iterator[World]:
    """Run a service on a PostgreSQL database of its own in the state `name`."""
    prepare, shape = WORLDS[name]
    with running_api(
        "postgresql", folder, node_breaks=0, control_every=0, lease_s=HOUR_S, heartbeat_s=HOUR_S / 3
    ) as api:
        made = World(name, api, shape=shape)
        with api.store.write() as connection:
            database = connection.scalar(text("SELECT current_database()"))
            connection.execute(text(f"ALTER DATABASE {database} SET deadlock_timeout = '20ms'"))
        api.store.reader.dispose()
        api.store.writer.dispose()
        made.nodes = [api.register(f"machine-{number}", devices=2) for number in range(2)]
        made.ablation = api.submit(**shape)["id"]
        made.archive = archive_of(make_bundle(make_file(**TWO), range(2)))
        assert _send_code(made)[0] == 200
        made.change(update(code_archives).values(used_at=db_now() - 100 * DAY_S))
        prepare(made)
        made.watch()
        made.keep()
        made.watcher = create_engine(api.store.url, isolation_level="AUTOCOMMIT")
        try:
            yield made
        finally:
            made.watcher.dispose()


def _said(answer: httpx.Response, *names: str) -> Answer:
    body = answer.json() if answer.content else {}
    if answer.is_success:
        return answer.status_code, *(body.get(name) for name in names)
    return answer.status_code, body.get("type")


def _claim(world: World) -> Answer:
    headers = world.api.worker_of("machine-1")
    return _said(world.api.client.post("/v1/blocks:claim", headers=headers, json={"node_id": world.nodes[1]}))


def _claim_more(world: World) -> Answer:
    headers = world.api.worker_of("machine-0")
    return _said(world.api.client.post("/v1/blocks:claim", headers=headers, json={"node_id": world.nodes[0]}))


def _claim_again(world: World) -> Answer:
    headers = world.api.worker_of("machine-0")
    body = {"node_id": world.nodes[0], "claim_id": f"{len(world.claimed) - 1:022d}"}
    answer = world.api.client.post("/v1/blocks:claim", headers=headers, json=body)
    return _said(answer, "block_index", "attempt_no")


def _heartbeat(world: World) -> Answer:
    block = world.claimed[-1]
    progress = [{"trial_id": block["trials"][0]["trial_id"], "steps_done": 1, "steps_total": 5}]
    logs = [{"trial_id": block["trials"][0]["trial_id"], "offset": 0, "text": "step 1\n"}]
    return _said(world.api.attempt(block, "heartbeat", progress=progress, logs=logs), "cancel")


def _report(world: World) -> Answer:
    return _said(world.report(), "block_state")


def _report_first(world: World) -> Answer:
    return _said(world.report(0), "block_state")


def _break(world: World) -> Answer:
    broke = {"failure_class": "timeout", "message": "it broke", "arm": world.claimed[-1]["trials"][0]["arm"]}
    return _said(world.api.attempt(world.claimed[-1], "report", **broke), "block_state")


def _fail(world: World) -> Answer:
    broke = {"failure_class": "user_error", "message": "it broke", "arm": None}
    return _said(world.api.attempt(world.claimed[-1], "report", **broke), "block_state")


def _cancel(world: World) -> Answer:
    return _said(world.api.cancel(world.ablation))


def _priority(world: World) -> Answer:
    path = f"/v1/ablations/{world.ablation}"
    return _said(world.api.client.patch(path, headers=world.api.admin, json={"priority": 70}), "priority")


def _quarantine(world: World) -> Answer:
    path, body = "/v1/nodes/machine-0:quarantine", {"reason": "its fan is loud"}
    return _said(world.api.client.post(path, headers=world.api.admin, json=body))


def _node(verb: str) -> Callable[[World], Answer]:
    def call(world: World) -> Answer:
        path = f"/v1/nodes/machine-0:{verb}"
        return _said(world.api.client.post(path, headers=world.api.admin, json={}))

    return call


def _page(world: World) -> Answer:
    return _said(world.api.get(f"/v1/ablations/{world.ablation}"), "state", "blocks", "trials", "priority")


def _nodes(world: World) -> Answer:
    answer = world.api.get("/v1/nodes")
    shown = sorted((node["name"], node["state"], len(node["runs"])) for node in answer.json()["items"])
    return answer.status_code, shown


def _key(verb: str) -> Callable[[World], Answer]:
    def call(world: World) -> Answer:
        path, body = f"/v1/nodes/machine-0:{verb}", {"reason": "lost"} if verb == "revoke-key" else {}
        return _said(world.api.client.post(path, headers=world.api.admin, json=body))

    return call


def _token(world: World) -> Answer:
    body = {"name": "somebody", "scope": "submit"}
    return _said(world.api.client.post("/v1/tokens", headers=world.api.admin, json=body))


def _import(world: World) -> Answer:
    headers = {**world.api.admin, "Content-Type": "application/x-tar"}
    path = "/v1/ablations:import?unsigned=true"
    return _said(world.api.client.post(path, headers=headers, content=world.archive), "state", "changed")


def _register(world: World) -> Answer:
    headers = world.api.worker_of("machine-0")
    body = json.loads(next(row["registration"] for row in world.rows["nodes"] if row["name"] == "machine-0"))
    return _said(world.api.client.put("/v1/nodes/machine-0", headers=headers, json=body))


def _submit(world: World) -> Answer:
    return _said(world.api.post_spec({**_spec(world), "ablation": "another"}, key="another"), "state")


def _spec(world: World) -> dict[str, Any]:
    return spec_values(**world.shape)


def _send_code(world: World) -> Answer:
    headers = {**world.api.admin, "Content-Type": "application/gzip"}
    params = {"digest": digest_bytes(CODE)}
    return _said(world.api.client.post("/v1/code:upload", params=params, headers=headers, content=CODE), "changed")


def _submit_code(world: World) -> Answer:
    values = command_values(ablation="with-code", workload__code={"archive": digest_bytes(CODE)})
    return _said(world.api.post_spec(values, key="with-code"), "state")


def _drop_code(world: World) -> Answer:
    keeper = Retention(world.api.store, drop_oldest, age_s=DAY_S)
    while keeper.round():
        pass
    return ("done",)


def _tick(world: World) -> Answer:
    Reconciler(world.api.store).tick()
    return ("done",)


def _background(kind: OutboxKind) -> Callable[[World], Answer]:
    def run(world: World) -> Answer:
        OutboxHandlers(world.api.store).run_due(kind)
        return ("done",)

    return run


def _retention(world: World) -> Answer:
    keeper = Retention(world.api.store, drop_logs, age_s=DAY_S)
    while keeper.round():
        pass
    return ("done",)


def _project(world: World) -> Answer:
    projector(world.api.store, Ledger()).run_due()
    return ("done",)


OPERATIONS: dict[str, Callable[[World], Answer]] = {
    "claim": _claim,
    "claim more": _claim_more,
    "claim again": _claim_again,
    "heartbeat": _heartbeat,
    "report": _report,
    "report first": _report_first,
    "break": _break,
    "fail": _fail,
    "cancel": _cancel,
    "priority": _priority,
    "drain": _node("drain"),
    "resume": _node("resume"),
    "register": _register,
    "submit": _submit,
    "send code": _send_code,
    "submit code": _submit_code,
    "drop code": _drop_code,
    "tick": _tick,
    "look": _background(OutboxKind.LOOK),
    "judge": _background(OutboxKind.JUDGE),
    "render": _background(OutboxKind.REPORT),
    "project": _project,
    "retention": _retention,
    "import": _import,
    "quarantine": _quarantine,
    "rotate key": _key("rotate-key"),
    "revoke key": _key("revoke-key"),
    "token": _token,
    "page": _page,
    "nodes": _nodes,
}
READS = {"page", "nodes"}
"""Operations that only read; two of them cannot disturb each other."""
APART = {
    *("import", "send code", "submit code", "drop code", "rotate key", "revoke key"),
    *("token", "retention", "render", "project", "quarantine", "nodes"),
}
"""Operations that do not depend on the state of a block; two worlds are enough for them."""
WORLDS_APART = {"running", "ended"}


def pairs(worlds: Iterable[str], firsts: Iterable[str], seconds: Iterable[str]) -> list[tuple[str, str, str]]:
    """Return every world with two operations, of which one may write."""
    return [
        (name, *both)
        for name, *both in product(worlds, firsts, seconds)
        if not READS.issuperset(both) and (name in WORLDS_APART or APART.isdisjoint(both))
    ]


_PLAIN = {
    "ablations": ("state", "priority", "blocks_*", "trials_done"),
    "blocks": ("state", "attempt_no"),
    "trials": ("state", "outcome", "steps_done"),
    "nodes": ("name", "draining", "quarantined_reason"),
    "attempts": ("number", "state", "failure_class", "arm"),
}


_LISTED = (
    *("code_archives", "code_owners", "code_uses", "receipts", "outbox", "log_chunks"),
    *("tokens", "token_secrets"),
)


def observed(world: World) -> dict[str, Any]:
    """Return the state of the database without ids, times and turns, so that equal states are equal values.

    Events are left out, because a block may end by several chains of moves; the checker reads them.
    """
    with world.api.store.read() as connection:
        rows = {name: _rows(connection, metadata.tables[name]) for name in [*_PLAIN, *_LISTED]}
    names = {world.ablation: "ablation"}
    for row in rows["ablations"]:
        names.setdefault(row["id"], row["name"])
    names |= {row["id"]: row["name"] for row in rows["nodes"]}
    for row in rows["blocks"]:
        names[row["id"]] = f"{names[row['ablation_id']]}/{row['index']}"
    for row in rows["trials"]:
        names[row["id"]] = f"{names[row['block_id']]}/{row['arm']}"
    for row in rows["attempts"]:
        names[row["id"]] = f"{names[row['block_id']]}#{row['number']}"
    seen: dict[str, Any] = {}
    for name, columns in _PLAIN.items():
        for row in rows[name]:
            keys = [key for key in row if key in columns or (key.startswith("blocks_") and "blocks_*" in columns)]
            seen[f"{name} {names[row['id']]}"] = [row[key] for key in keys]
    for row in (row for row in rows["blocks"] if row["state"] in ("queued", "running", "held")):
        holder = [names.get(row["attempt_id"]), names.get(row["node_id"]), row["lease_until"] is not None]
        seen[f"holder {names[row['id']]}"] = holder
    for row in rows["attempts"]:
        seen[f"node of {names[row['id']]}"] = names[row["node_id"]]
    seen["receipts"] = sorted(f"{names[row['trial_id']]} of {names[row['attempt_id']]}" for row in rows["receipts"])
    seen["logs"] = sorted(f"{names[row['trial_id']]} to {row['end_offset']}" for row in rows["log_chunks"])
    seen["code"] = sorted(f"{row['digest']} of {row['size']}" for row in rows["code_archives"])
    seen["code owners"] = sorted(f"{row['digest']} shared by {row['shared_by']}" for row in rows["code_owners"])
    seen["code uses"] = sorted(f"{row['digest']} by {names[row['ablation_id']]}" for row in rows["code_uses"])
    seen["tokens"] = sorted(f"{row['name']} {row['revoked_at'] is None}" for row in rows["tokens"])
    seen["secrets"] = sorted(f"{row['ends_at'] is None}" for row in rows["token_secrets"])
    seen["outbox"] = sorted({f"{row['kind']} {names.get(row['key'], row['key'])}" for row in rows["outbox"]})
    return seen
