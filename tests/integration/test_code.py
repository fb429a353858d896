"""Code that people send: stored once by digest, for nodes whose blocks use it, and dropped when it is old."""

import hashlib
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select, update

from ablate.experiments.errors import SpecError
from ablate.experiments.records.code_archive import pack_code
from ablate.experiments.records.code_tree import MOST_BYTES
from ablate.service.app import create_app
from ablate.service.background.main import Retention, retention
from ablate.service.stack.backup import back_up
from ablate.service.store.files import code_archives
from ablate.service.store.files.code_archives import drop_oldest, lacking, totals, use_archives
from ablate.service.store.session import Store
from ablate.service.store.tables import ablations, code_pieces, code_uses, db_now
from tests.api_stack import (
    ADMIN,
    BOTH,
    WORKER,
    Api,
    api_fixture,
    bearer,
    migrated_url,
    running_api,
    served_api,
    settings_for,
)
from tests.factories import command_values
from tests.ports import free_port
from tests.programs import write_program
from tests.service_process import API, is_up, service_process
from tests.waiting import LIMIT_S, at_once, until

DAY_S = 86_400.0
GZIP = {"Content-Type": "application/gzip"}

api = api_fixture()


def content_of(seed: int, size: int = 3_000_000) -> bytes:
    return random.Random(seed).randbytes(size)  # noqa: S311 - a reproducible draw


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def upload(api: Api, content: bytes, *, digest: str | None = None, headers: Any = None) -> httpx.Response:
    params = {"digest": digest or digest_of(content)}
    return api.client.post(
        "/v1/code:upload", params=params, content=content, headers={**(headers or api.admin), **GZIP}
    )


def submit_with(api: Api, *digests: str, **changes: Any) -> httpx.Response:
    """Submit a command whose workload, and whose variants, have these archives."""
    first, *others = [{"archive": digest} for digest in digests]
    variants = {f"v{number}": {"code": code} for number, code in enumerate(others)} or {"v": {"args": ["x"]}}
    return api.post_spec(command_values(workload__code=first, variants=variants, **changes))


def age(api: Api, days: float) -> None:
    """Let all archives and ended ablations be older."""
    with api.store.write() as connection:
        archives = code_archives.code_archives
        connection.execute(update(archives).values(used_at=archives.c.used_at - days * DAY_S))
        connection.execute(update(ablations).values(finished_at=ablations.c.finished_at - days * DAY_S))


def dropped(api: Api, days: float = 30) -> int:
    keeper, count = Retention(api.store, drop_oldest, age_s=days * DAY_S), 0
    while keeper.round():
        count += 1
    return count


def test_an_archive_is_stored_once_and_comes_back_byte_for_byte(api: Api) -> None:
    content = content_of(1)
    digest = digest_of(content)
    find = {"digests": [digest, digest_of(b"other")]}
    assert api.client.post("/v1/code:find", headers=api.admin, json=find).json()["missing"] == sorted(find["digests"])
    first = upload(api, content)
    assert (first.status_code, first.json()) == (200, {"digest": digest, "size": len(content), "changed": True})
    assert upload(api, content).json()["changed"] is False
    assert api.client.post("/v1/code:find", headers=api.admin, json=find).json()["missing"] == [digest_of(b"other")]
    accepted = submit_with(api, digest)
    assert accepted.status_code == 202, accepted.text
    node = api.register(lanes={"command": None})
    block = api.claimed(node)
    path = f"/v1/attempts/{block['attempt_id']}/code/"
    answer = api.client.get(path + digest, headers=api.worker_of("node-a"))
    assert (answer.status_code, answer.content) == (200, content)
    assert answer.headers["content-length"] == str(len(content))
    upload(api, b"unused")
    other = api.client.get(path + digest_of(b"unused"), headers=api.worker_of("node-a"))
    assert (other.status_code, "uses no stored code" in other.json()["detail"]) == (404, True)
    assert api.client.get(path + digest, headers=api.worker_of("node-b")).status_code == 403
    assert api.client.get(path + digest, headers=api.admin).status_code == 403
    api.attempt(block, "report", failure_class="preempted", message="x")
    assert api.client.get(path + digest, headers=api.worker_of("node-a")).status_code == 409


def test_what_is_no_archive_of_that_digest_is_refused_with_the_reason(api: Api) -> None:
    wrong = upload(api, b"abc", digest=digest_of(b"abd"))
    assert wrong.status_code == 422
    assert digest_of(b"abc") in wrong.json()["errors"][0]["detail"]
    assert upload(api, b"").status_code == 422
    assert upload(api, b"x", digest="sha256:12").status_code == 422
    params = {"digest": digest_of(b"x")}
    assert api.client.post("/v1/code:upload", params=params, content=b"x", headers=api.admin).status_code == 415
    with api.store.read() as connection:
        assert totals(connection) == (0, 0)


def test_the_scope_code_is_needed(api: Api) -> None:
    for scope, status in (("read", 403), ("submit", 403), ("code", 200), ("operate", 200)):
        headers = api.token(f"with-{scope}", scope)
        assert upload(api, b"x", headers=headers).status_code == status
        assert api.client.post("/v1/code:find", headers=headers, json={"digests": []}).status_code == status
    large = upload(api, content_of(2, 2_000_000), headers=api.token("more", "submit"))
    assert large.status_code in {403, 413}, "no large body is read of somebody who may not send it"


def test_a_spec_needs_its_archives_and_no_relative_folder(api: Api) -> None:
    content, missing = content_of(3, 10), [digest_of(b"a"), digest_of(b"b")]
    upload(api, content)
    refused = submit_with(api, digest_of(content), missing[0], missing[1])
    assert refused.status_code == 422
    reasons = {error["pointer"]: error["detail"] for error in refused.json()["errors"]}
    assert reasons == {
        f"#/variants/v{number}/code": f"the service has no archive {one} of yours" for number, one in enumerate(missing)
    }
    with api.store.read() as connection:
        assert connection.execute(select(func.count()).select_from(ablations)).scalar_one() == 0
    relative = api.post_spec(command_values(workload__code="."))
    (error,) = relative.json()["errors"]
    assert (relative.status_code, error["pointer"]) == (422, "#/workload/code")
    assert "ablate run" in error["hint"]


def test_the_archive_of_an_evaluation_is_needed_and_comes_with_every_block(api: Api) -> None:
    content, judging = content_of(4, 10), content_of(5, 10)
    evaluate = {"command": ["python", "judge.py"], "code": {"archive": digest_of(judging)}}
    changes = {"workload__evaluate": evaluate, "workload__metrics": {"val": {"better": "lower"}}}
    upload(api, content)
    refused = submit_with(api, digest_of(content), **changes)
    assert (refused.status_code, "#/workload/evaluate/code" in refused.text) == (422, True)
    upload(api, judging)
    assert submit_with(api, digest_of(content), **changes).status_code == 202
    block = api.claimed(api.register(lanes={"command": None}))
    assert {trial["config"]["evaluate"]["code"]["archive"] for trial in block["trials"]} == {digest_of(judging)}
    path = f"/v1/attempts/{block['attempt_id']}/code/"
    for own in (content, judging):
        assert api.client.get(path + digest_of(own), headers=api.worker_of("node-a")).content == own


def test_a_session_of_sent_code_says_that_no_evaluation_protects_its_numbers(api: Api) -> None:
    content = content_of(6, 10)
    upload(api, content)
    rule = {"primary": {"metric": "val", "margin": "1%"}}
    for name, evaluate in (("open", {}), ("protected", {"workload__evaluate": ["python", "judge.py"]})):
        values = command_values(
            workload__code={"archive": digest_of(content)},
            workload__metrics={"val": {"better": "lower"}},
            design__seeds=6,
            verdict=rule,
            **evaluate,
        )
        session = api.client.post(f"/v1/sessions/{name}:open", headers=api.admin, json=values)
        assert session.status_code == 201, session.text
        advice = session.json()["advice"] or ""
        assert ("workload.evaluate" in advice, "code that reports val" in advice) == ((name == "open",) * 2)


@pytest.mark.parametrize("kind", BOTH)
def test_all_archives_together_are_bounded_exactly(kind: str, tmp_path: Path) -> None:
    with running_api(kind, tmp_path, max_code_bytes=1_000) as api:
        assert upload(api, content_of(1, 600)).status_code == 200
        full = upload(api, content_of(2, 401))
        assert (full.status_code, full.json()["type"]) == (507, "urn:ablate:problem:code-storage-full")
        assert "ABLATE_MAX_CODE_BYTES" in full.json()["detail"]
        assert upload(api, content_of(3, 400)).status_code == 200
        assert upload(api, content_of(1, 600)).status_code == 200, "a stored one needs no room"
        age(api, 31)
        assert dropped(api) == 2
        assert upload(api, content_of(2, 401)).status_code == 200
        metrics = api.client.get("/metrics").text
        assert "ablate_code_archives 1.0" in metrics
        assert "ablate_code_bytes 401.0" in metrics


def test_the_largest_archive_is_taken_and_a_larger_one_is_not(tmp_path: Path) -> None:
    with served_api("sqlite", tmp_path, max_report_bytes=2 * MOST_BYTES) as api:
        largest = content_of(5, 2**20) * 64
        assert upload(api, largest).json()["size"] == MOST_BYTES
        too_large = upload(api, largest + b"x")
        assert (too_large.status_code, "67,108,864" in too_large.json()["detail"]) == (422, True)
    with served_api("sqlite", tmp_path / "usual") as api:
        assert upload(api, largest).status_code == 200
        assert upload(api, largest + b"x").status_code == 413


@contextmanager
def two_processes(kind: str, folder: Path, **changes: Any) -> Iterator[tuple[Api, Api]]:
    """Two API processes' worth of application and connections on one database."""
    url = migrated_url(kind, folder)
    with ExitStack() as stack:
        apis = []
        for number in range(2):
            settings = settings_for(url, folder / f"home-{number}", **changes)
            store = Store(url)
            client = stack.enter_context(TestClient(create_app(settings, store), raise_server_exceptions=False))
            apis.append(Api(client, store))
        yield apis[0], apis[1]


@pytest.mark.parametrize("kind", BOTH)
def test_uploads_to_two_processes_at_once_store_each_archive_once(kind: str, tmp_path: Path) -> None:
    with two_processes(kind, tmp_path, max_code_bytes=2_500_000) as apis:
        contents = [content_of(number % 2, 1_000_000) for number in range(8)]
        answers = at_once(lambda number: upload(apis[number % 4 // 2], contents[number]), 8)
        assert [answer.status_code for answer in answers] == [200] * 8
        assert sum(answer.json()["changed"] for answer in answers) == 2
        more = at_once(lambda number: upload(apis[number % 2], content_of(10 + number, 400_000)), 6)
        assert sorted(answer.status_code for answer in more) == [200, *[507] * 5]
        with apis[0].store.read() as connection:
            assert totals(connection) == (3, 2_400_000)
            assert connection.execute(select(func.sum(func.length(code_pieces.c.data)))).scalar_one() == 2_400_000


def test_archives_live_as_long_as_they_are_used_and_some_days(api: Api) -> None:
    contents = {name: content_of(number, 50) for number, name in enumerate(("running", "ended", "alone", "fresh"))}
    for content in contents.values():
        upload(api, content)
    running = submit_with(api, digest_of(contents["running"]))
    ended = submit_with(api, digest_of(contents["ended"])).json()["id"]
    assert running.status_code == 202
    assert api.cancel(ended).status_code == 202
    age(api, 29)
    upload(api, contents["fresh"])
    assert dropped(api) == 0
    age(api, 2)
    assert dropped(api, days=0) == 0, "0 keeps all"
    assert dropped(api) == 2
    with api.store.write() as connection:
        gone = {name for name, content in contents.items() if lacking(connection, [digest_of(content)], user=None)}
        assert connection.execute(select(func.count()).select_from(code_uses)).scalar_one() == 2, "the record stays"
    assert gone == {"ended", "alone"}
    with api.store.write() as connection:
        connection.execute(update(ablations).where(ablations.c.id == ended).values(finished_at=db_now()))


def test_the_background_process_drops_logs_and_code_in_turn(api: Api, tmp_path: Path) -> None:
    upload(api, b"old")
    assert api.cancel(submit_with(api, digest_of(b"old")).json()["id"]).status_code == 202
    age(api, 100)
    work = retention(api.store, settings_for(api.store.url, tmp_path))
    assert work(), "both had something to drop"
    while work():
        pass
    with api.store.read() as connection:
        assert totals(connection) == (0, 0)
        assert connection.execute(select(ablations.c.logs_dropped_at)).scalar_one() is not None


@pytest.mark.parametrize("kind", BOTH)
def test_a_submission_and_a_deletion_at_once_end_in_one_of_two_orders(kind: str, tmp_path: Path) -> None:
    with two_processes(kind, tmp_path) as (api, other):
        content = content_of(1, 50)
        upload(api, content)
        age(api, 31)
        with ExitStack() as open_transactions:
            connection = open_transactions.enter_context(api.store.write())
            ours = submission(api, connection)
            use_archives(connection, ours, {"#/workload/code": digest_of(content)}, user=None)
            result: list[str | None] = []
            keeper = threading.Thread(target=lambda: result.append(dropped_by(other)))
            keeper.start()
            keeper.join(0.5)
            assert keeper.is_alive(), "the deletion waits for the submission"
        keeper.join(LIMIT_S)
        assert result == [None]
        age(api, 31)
        finish(api)
        with api.store.write() as connection:
            assert drop_oldest(connection, age_s=30 * DAY_S) == digest_of(content)
            answers: list[httpx.Response] = []
            sender = threading.Thread(target=lambda: answers.append(submit_with(other, digest_of(content))))
            sender.start()
            sender.join(0.5)
            assert sender.is_alive(), "the submission waits for the deletion"
        sender.join(LIMIT_S)
        assert [answer.status_code for answer in answers] == [422]
        assert "has no archive" in answers[0].text


def submission(api: Api, connection: Any) -> str:
    """Insert the row of an unfinished ablation without code, in the transaction of the caller."""
    name = f"abl_{'0' * 26}"
    row = {column.name: "x" for column in ablations.columns if not column.nullable}
    numbers = {c.name: 0 for c in ablations.columns if not c.nullable and c.type.python_type in {int, float}}
    connection.execute(ablations.insert().values({**row, **numbers, "id": name, "state": "queued"}))
    return name


def dropped_by(api: Api) -> str | None:
    with api.store.write() as connection:
        return drop_oldest(connection, age_s=30 * DAY_S)


def finish(api: Api) -> None:
    with api.store.write() as connection:
        connection.execute(update(ablations).values(finished_at=db_now() - 40 * DAY_S, state="completed"))


def test_missing_archives_are_told_by_pointer(api: Api) -> None:
    places = {"#/workload/code": digest_of(b"1"), "#/variants/v/code": digest_of(b"2")}
    with pytest.raises(SpecError) as caught, api.store.write() as connection:
        use_archives(connection, "abl_x", places, user=None)
    assert [problem.pointer for problem in caught.value.problems] == ["#/workload/code", "#/variants/v/code"]


def test_an_interrupted_upload_leaves_nothing_and_can_be_sent_again(tmp_path: Path) -> None:
    content = content_of(7)
    with served_api("sqlite", tmp_path) as api:
        address = (api.client.base_url.host, api.client.base_url.port)
        with socket.create_connection(address) as connection:
            head = f"POST /v1/code:upload?digest={digest_of(content)} HTTP/1.1\r\nHost: x\r\n"
            head += f"Authorization: {api.admin['Authorization']}\r\nContent-Type: application/gzip\r\n"
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content[:1_500_000])
        assert upload(api, content).json()["changed"] is True
        with api.store.read() as connection:
            assert totals(connection) == (1, len(content))


def test_a_backup_has_the_code(tmp_path: Path) -> None:
    with running_api("sqlite", tmp_path) as api:
        content = content_of(8)
        upload(api, content)
        back_up(api.store.url, tmp_path / "backup.db")
    restored = Store(f"sqlite:///{tmp_path / 'backup.db'}")
    assert b"".join(code_archives.read_pieces(restored, digest_of(content))) == content
    restored.close()


def test_the_client_sends_a_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ablate.service.client.api import Client

    folder = write_program(tmp_path / "lab/src")
    spec = tmp_path / "lab/spec.yaml"
    text = "\n".join(
        [
            "ablation: sent",
            "question: Is it sent?",
            "workload:",
            "  command: [python, train.py]",
            "  code: ./src   # the folder beside this file",
            "variants: {v: {args: [x]}, again: {code: src, args: [y]}}",
            "design: {seeds: [1], blocks: {count: 6}}",
            "placement: {node_class: cpu}",
            "verdict: {primary: {metric: process_s, margin: 1%}}",
        ]
    )
    spec.write_text(text)
    digest = pack_code(folder).digest
    with served_api("sqlite", tmp_path) as api:
        secret = api.admin["Authorization"].removeprefix("Bearer ")
        with Client(str(api.client.base_url), secret) as client:
            uploads = []
            call = client.ablations._connection.call
            monkeypatch.setattr(
                client.ablations._connection,
                "call",
                lambda method, path, **options: (uploads.append(path), call(method, path, **options))[1],
            )
            first = client.ablations.submit(spec)
            client.ablations.submit(spec)
            assert uploads.count("/v1/code:upload") == 1
            stored = client.ablations.spec(first.id).content.decode()
            assert f'code: {{archive: "{digest}"}}   # the folder beside this file' in stored
            assert f'again: {{code: {{archive: "{digest}"}}, args: [y]}}' in stored
            assert client.ablations.plan(spec).spec_digest == first.spec_digest


@pytest.mark.parametrize("kind", BOTH)
def test_a_process_that_is_killed_during_uploads_leaves_whole_archives_only(kind: str, tmp_path: Path) -> None:
    url, ports = migrated_url(kind, tmp_path), [free_port(), free_port()]
    settings = {"home": tmp_path, "database_url": url, "admin_token": ADMIN, "worker_token": WORKER}
    contents = [content_of(number, 8_000_000) for number in range(4)]

    def send(port: int, content: bytes) -> int:
        headers = {**bearer(ADMIN), **GZIP}
        address = f"http://127.0.0.1:{port}/v1/code:upload"
        try:
            with httpx.Client(trust_env=False, timeout=LIMIT_S) as client:
                answer = client.post(address, params={"digest": digest_of(content)}, content=content, headers=headers)
                return answer.status_code
        except httpx.TransportError:
            return 0

    with ExitStack() as running:
        processes = [
            running.enter_context(service_process(API, tmp_path / f"log-{port}", port=port, **settings))
            for port in ports
        ]
        until(lambda: all(is_up(f"http://127.0.0.1:{port}") for port in ports), what="both processes are up")
        killer = threading.Timer(0.3, processes[0].kill)
        killer.start()
        first = at_once(lambda number: send(ports[0], contents[number]), 4)
        assert set(first) <= {0, 200}
        second = at_once(lambda number: send(ports[1], contents[number]), 4)
        assert second == [200] * 4
    store = Store(url)
    with store.read() as connection:
        assert totals(connection) == (4, 32_000_000)
    for content in contents:
        assert b"".join(code_archives.read_pieces(store, digest_of(content))) == content
    store.close()
