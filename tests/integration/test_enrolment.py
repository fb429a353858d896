"""Enrolment tokens: who may make a node of itself, and nodes that come and go with their allocations."""

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update
from typer.testing import CliRunner

from ablate.experiments.digest import digest_bytes
from ablate.experiments.outcomes import ExitCode
from ablate.service.background.reconciler import Reconciler
from ablate.service.store.nodes import nodes as stored
from ablate.service.store.tables import db_now, nodes, token_secrets, tokens
from ablate.workers.cli import app as worker_program
from ablate.workers.leases.enrolment import enroller
from ablate.workers.settings import Settings, get_settings
from tests.api_stack import SIGNER, Api, api_fixture, bearer, receipts_of, served_api
from tests.integration.worker_service import worker
from tests.waiting import LIMIT_S, until

api = api_fixture()


def make(api: Api, node_class: str = "cpu", **more: Any) -> dict[str, Any]:
    answer = api.client.post("/v1/enrolments", headers=api.admin, json={"node_class": node_class, **more})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def enrol(api: Api, token: str, name: str, key: str, node_class: str = "cpu") -> httpx.Response:
    body = {"node_class": node_class, "key_digest": digest_bytes(key.encode())}
    return api.client.post(f"/v1/nodes/{name}:enrol", headers=bearer(token), json=body)


def join(api: Api, name: str, key: str, **more: Any) -> httpx.Response:
    """Register as an enrolled worker does."""
    body = {
        "node_class": "cpu",
        "devices": [{"index": 0, "name": "x", "memory_bytes": 1}],
        "versions": {},
        "code_digest": "sha256:c",
        "public_key": SIGNER.key,
        "allocation": "slurm-7",
        **more,
    }
    return api.client.put(f"/v1/nodes/{name}", headers=bearer(key), json=body)


def names(api: Api) -> list[str]:
    return [row["name"] for row in api.get("/v1/nodes").json()["items"]]


def listed(api: Api, name: str) -> dict[str, Any]:
    return next(row for row in api.get("/v1/tokens").json()["items"] if row["name"] == name)


def test_a_token_makes_as_many_nodes_of_its_class_as_it_has_uses(api: Api) -> None:
    made = make(api, uses=2)
    with api.store.read() as connection:
        assert made["secret"] not in str(connection.execute(select(token_secrets)).all()), "only its digest is stored"
    for name in ("one", "two"):
        assert enrol(api, made["secret"], name, f"key-of-{name}").status_code == 204
        assert join(api, name, f"key-of-{name}").status_code == 200
    refused = enrol(api, made["secret"], "three", "key-of-three")
    assert (refused.status_code, refused.json()["type"]) == (403, "urn:ablate:problem:enrolment-refused")
    assert "every use of this enrolment token is used up" in refused.json()["detail"]
    assert listed(api, made["name"])["uses_left"] == 0
    assert join(api, "three", "key-of-three").status_code == 401
    assert {"one", "two"} <= set(names(api))
    assert [row["allocation"] for row in api.get("/v1/nodes").json()["items"]] == ["slurm-7", "slurm-7"]


def test_a_repeated_call_uses_nothing_up_and_nobody_takes_a_node_or_a_key_over(api: Api) -> None:
    made = make(api, uses=5)
    for _ in range(3):
        assert enrol(api, made["secret"], "mine", "my-key").status_code == 204
    assert listed(api, made["name"])["uses_left"] == 4
    assert enrol(api, made["secret"], "mine", "the-key-of-another").status_code == 409
    assert enrol(api, made["secret"], "other", "my-key").status_code == 409
    assert enrol(api, made["secret"], "tester", "for-the-node-of-the-settings").status_code == 409
    admin = api.admin["Authorization"].removeprefix("Bearer ")
    assert enrol(api, made["secret"], "admin-node", admin).status_code == 409
    assert listed(api, made["name"])["uses_left"] == 4, "a refused call uses nothing up"


def test_workers_at_once_get_no_use_too_many(api: Api) -> None:
    made, statuses = make(api, uses=5), []
    calls = [
        threading.Thread(target=lambda n=n: statuses.append(enrol(api, made["secret"], f"n-{n}", f"k-{n}").status_code))
        for n in range(12)
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert sorted(statuses) == [204] * 5 + [403] * 7


def test_a_revoked_an_expired_and_a_token_of_another_class_are_refused_with_their_reason(api: Api) -> None:
    other = enrol(api, make(api, "h200")["secret"], "n", "k")
    assert other.status_code == 403
    assert "is for class 'h200', and the worker is of class 'cpu'" in other.json()["detail"]
    gone = make(api)
    assert enrol(api, gone["secret"], "before", "key-before").status_code == 204
    path = f"/v1/enrolments/{gone['name'].replace('/', '%2F')}:revoke"
    assert api.client.post(path, headers=api.admin, json={"reason": "it leaked"}).status_code == 204
    refused = enrol(api, gone["secret"], "n", "k")
    assert refused.status_code == 401
    assert "this enrolment token was revoked: it leaked" in refused.json()["detail"]
    assert join(api, "before", "key-before").status_code == 200, "nodes that enrolled stay"
    old = make(api, lasts_s=60.0)
    with api.store.write() as connection:
        own = select(tokens.c.id).where(tokens.c.name == old["name"]).scalar_subquery()
        connection.execute(update(token_secrets).where(token_secrets.c.token_id == own).values(ends_at=db_now() - 1))
    refused = enrol(api, old["secret"], "n", "k")
    assert refused.status_code == 401
    assert "this enrolment token has expired; an operator makes another: ablate nodes enrol cpu" in refused.text
    unknown = api.client.post("/v1/enrolments", headers=api.admin, json={"node_class": "CPU"})
    assert (unknown.status_code, "h200" in unknown.text) == (422, True), unknown.text


def test_a_class_that_is_nearly_a_known_one_is_doubted_until_somebody_insists(api: Api) -> None:
    def added(node_class: str, **more: Any) -> httpx.Response:
        return api.client.post("/v1/enrolments", headers=api.admin, json={"node_class": node_class, **more})

    refused = added("h2000")
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "#/node_class")
    assert "did you mean 'h200'? For a GPU that is really called so: new_class" in refused.text
    body = {"name": "gpu-7", "node_class": "rtx-4080", "new_class": False}
    assert "did you mean 'rtx-4090'" in api.client.post("/v1/nodes", headers=api.admin, json=body).text
    for certain in ("h200", "a100-80gb", "rtx-4090", "gh200-480gb", "b300"):
        assert added(certain).status_code == 201, certain
    assert added("b3000").status_code == 422, "a class with a token is known, too"
    body["new_class"] = True
    assert api.client.post("/v1/nodes", headers=api.admin, json=body).status_code == 201
    assert added("rtx-4080").status_code == 201, "known from now on"


@pytest.mark.parametrize("limits", [{"uses": 0}, {"uses": 100_001}, {"lasts_s": 0.0}, {"lasts_s": 7_776_001.0}])
def test_a_token_without_end_or_count_is_refused(api: Api, limits: dict[str, Any]) -> None:
    body = {"node_class": "cpu", **limits}
    assert api.client.post("/v1/enrolments", headers=api.admin, json=body).status_code == 422


def test_a_key_registers_only_its_node_and_its_class(api: Api) -> None:
    made = make(api)
    assert enrol(api, made["secret"], "mine", "my-key").status_code == 204
    assert join(api, "other", "my-key").status_code == 403
    assert join(api, "mine", "my-key", node_class="h200").status_code == 403
    leaves = api.client.post("/v1/nodes/other:leave", headers=bearer("my-key"))
    assert (leaves.status_code, "belongs to node 'mine', not to 'other'" in leaves.text) == (403, True)


def test_a_node_leaves_with_its_allocation_and_its_results_stay(api: Api) -> None:
    made, key = make(api), "my-key"
    assert enrol(api, made["secret"], "guest", key).status_code == 204
    node = str(join(api, "guest", key).json()["node_id"])
    api._keys["guest"], api._names[node] = bearer(key), "guest"
    api.submit()
    block = api.claimed(node)
    assert api.attempt(block, "report", receipts=receipts_of(block, node)).status_code == 200
    trial = block["trials"][0]["trial_id"]
    receipt, trusted = api.get(f"/v1/trials/{trial}/receipt").content, api.get("/v1/keys").json()
    assert api.client.post("/v1/nodes/guest:leave", headers=bearer(key)).status_code == 204
    assert "guest" not in names(api)
    assert api.get(f"/v1/trials/{trial}/receipt").content == receipt
    assert api.get("/v1/keys").json() == trusted
    again = api.client.post("/v1/blocks:claim", headers=bearer(key), json={"node_id": node})
    assert (again.status_code, "allocation slurm-7 has ended" in str(listed(api, "node/guest"))) == (401, True)
    assert api.get("/v1/waiting").json()["items"][0]["nodes"] == 0
    reason = api.get(f"/v1/ablations/{block['ablation_id']}").json()["waiting_for"]
    assert "guest" not in reason, "a node that has left is no reason to wait"


def test_a_node_without_an_allocation_does_not_leave(api: Api) -> None:
    api.register("stays")
    refused = api.client.post("/v1/nodes/stays:leave", headers=api.worker_of("stays"))
    assert (refused.status_code, "belongs to no allocation" in refused.text) == (403, True)
    assert "stays" in names(api)


_MINUTE = 60.0
_GONE = {  # seconds of silence, and seconds since its time was over (None: it has no time) -> whether it leaves
    (5.0, 3600.0): False,
    (9 * _MINUTE, 3600.0): False,
    (11 * _MINUTE, 9 * _MINUTE): False,
    (11 * _MINUTE, 11 * _MINUTE): True,
    (5 * 3600.0, -3600.0): False,
    (23 * 3600.0, None): False,
    (25 * 3600.0, None): True,
}


def test_a_silent_node_leaves_only_after_the_time_of_its_allocation(api: Api) -> None:
    made = make(api, uses=len(_GONE))
    api.register("static")
    for number, (silent_s, over_s) in enumerate(_GONE):
        assert enrol(api, made["secret"], f"n{number}", f"k{number}").status_code == 204
        assert join(api, f"n{number}", f"k{number}").status_code == 200
        _set_times(api, f"n{number}", silent_s, over_s)
    _set_times(api, "static", 1e6, 1e6)
    Reconciler(api.store).tick()
    staying = [f"n{number}" for number, gone in enumerate(_GONE.values()) if not gone]
    assert set(names(api)) == {"static", *staying}
    with api.store.read() as connection:
        assert len(stored.kinds(connection)) == 1


def _set_times(api: Api, name: str, silent_s: float, over_s: float | None) -> None:
    times = {"seen_at": db_now() - silent_s, "ends_at": None if over_s is None else db_now() - over_s}
    with api.store.write() as connection:
        connection.execute(update(nodes).where(nodes.c.name == name).values(**times))


HOSTS = ["gpu-7", "a" * 120, "x.y_z"]
JOBS: Sequence[tuple[dict[str, str], str]] = [
    ({"SLURM_JOB_ID": "1234"}, "slurm-1234"),
    ({"SLURM_JOB_ID": "1240", "SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "6"}, "slurm-1234_6"),
    ({"ABLATE_ALLOCATION": "my job/π 7"}, "my-job-7"),
    ({}, "run-"),
]


@pytest.mark.parametrize("host", HOSTS, ids=["short", "long", "signs"])
@pytest.mark.parametrize(("variables", "allocation"), JOBS, ids=["job", "array", "own", "none"])
def test_a_node_is_named_after_its_host_and_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, variables: dict[str, str], allocation: str
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = Settings(home=tmp_path, node_name=host, enrolment_token="a-token-to-enrol")  # type: ignore[arg-type]
    one, two = enroller(settings), enroller(settings)
    assert one is not None
    assert two is not None
    name = one.settings.node_name
    assert Settings(node_name=name).node_name == name, "the service allows it"
    assert re.fullmatch(rf"{re.escape(host[:56])}-{one.allocation}-[0-9a-f]{{6}}", name)
    assert one.allocation.startswith(allocation)
    assert two.settings.node_name != name
    assert two.settings.read_token() != one.settings.read_token()


def test_a_worker_with_a_key_does_not_enrol(tmp_path: Path) -> None:
    both = Settings(home=tmp_path, enrolment_token="to-enrol", worker_token="own-key")  # type: ignore[arg-type]
    assert enroller(both) is None
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "enrolment").write_text("from-a-file\n")
    joining = enroller(Settings(home=tmp_path))
    assert joining is not None
    assert joining.token == "from-a-file"


def test_a_worker_enrols_works_and_leaves_and_a_second_one_finds_no_use(tmp_path: Path) -> None:
    with served_api("sqlite", tmp_path) as api:
        made, url = make(api), str(api.client.base_url).rstrip("/")
        variables = {"ABLATE_ENROLMENT_TOKEN": made["secret"], "SLURM_JOB_ID": "77"}
        with worker(tmp_path / "one", url, **variables) as process:
            until(lambda: len(names(api)) == 1)
            assert re.fullmatch("tester-slurm-77-[0-9a-f]{6}", names(api)[0])
            process.terminate()
            assert process.wait(LIMIT_S) == 0
        assert names(api) == [], "it has left"
        with worker(tmp_path / "two", url, **variables) as process:
            assert process.wait(LIMIT_S) == ExitCode.ERROR
        log = " ".join((tmp_path / "two" / "worker.log").read_text().split())
        assert "worker cannot run: the service answered 403: every use of this enrolment token is used up" in log
        assert made["secret"] not in log


def test_the_doctor_says_that_the_worker_enrols_or_that_its_token_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served_api("sqlite", tmp_path) as api:
        monkeypatch.setenv("ABLATE_HOME", str(tmp_path / "node"))
        monkeypatch.delenv("ABLATE_WORKER_TOKEN", raising=False)
        right = (True, "none: enrols at its start as a node of class cpu")
        assert _worker_key(monkeypatch, api, make(api)["secret"]) == right
        reader = api.token("reader", "read")["Authorization"].removeprefix("Bearer ")
        passed, detail = _worker_key(monkeypatch, api, reader)
        assert not passed
        assert "the token 'reader' with scope 'read', no enrolment token; get one: ablate nodes enrol CLASS" in detail


def _worker_key(monkeypatch: pytest.MonkeyPatch, api: Api, token: str) -> tuple[bool, str]:
    monkeypatch.setenv(
        "ABLATE_URL", str(api.client.base_url)
    )  # the doctor hides both from the processes that it starts
    monkeypatch.setenv("ABLATE_ENROLMENT_TOKEN", token)
    get_settings.cache_clear()
    try:
        answer = CliRunner().invoke(worker_program, ["doctor", "--json"])
    finally:
        get_settings.cache_clear()
    check = next(one for one in json.loads(answer.stdout) if one["name"] == "worker key")
    return check["passed"], check["detail"]
