"""Tokens and node keys on both databases: replaced secrets, quotas, the settings' own, and what a claim may hold."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select, text, update

from ablate.service.app import create_app
from ablate.service.errors import ConfigurationError, Unauthorized
from ablate.service.http.authentication import Authenticator, bootstrap
from ablate.service.principals import Scope
from ablate.service.store.access.tokens import NewToken, create, node_token, replace_settings_tokens
from ablate.service.store.migrate import upgrade
from ablate.service.store.session import Store
from ablate.service.store.tables import attempts, blocks, db_now, token_secrets
from tests.api_stack import (
    ADMIN,
    NODE,
    SIGNER,
    WORKER,
    Api,
    api_fixture,
    bearer,
    database_url,
    running_api,
    settings_for,
)
from tests.factories import spec_values
from tests.waiting import at_once, until

KINDS = ["sqlite", "postgresql"]


api = api_fixture(scope="module")


def admin(api: Api, path: str, **body: Any) -> httpx.Response:
    return api.client.post(path, headers=api.admin, json=body)


def works(api: Api, headers: dict[str, str]) -> bool:
    status = api.client.get("/v1/identity", headers=headers).status_code
    assert status in (200, 401)
    return status == 200


def submit(api: Api, headers: dict[str, str], key: str, **changes: Any) -> httpx.Response:
    return api.client.post("/v1/ablations", headers={**headers, "Idempotency-Key": key}, json=spec_values(**changes))


def let_time_pass(api: Api, seconds: float) -> None:
    """Move the ends of all secrets into the past; what was cached was to be asked again by then."""
    with api.store.write() as connection:
        connection.execute(update(token_secrets).values(ends_at=token_secrets.c.ends_at - seconds))
    api.client.app.state.services.authenticator.forget()  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/v1/tokens/{}:rotate", "/v1/nodes/{}:rotate-key"])
def test_old_and_new_secret_count_until_the_grace_is_over(api: Api, path: str) -> None:
    name = f"rotated{len(path)}"
    old = api.worker_of(name) if "nodes" in path else api.token(name, "submit")
    new = bearer(admin(api, path.format(name), grace_s=600).json()["secret"])
    assert (works(api, old), works(api, new)) == (True, True)
    let_time_pass(api, 599)
    assert (works(api, old), works(api, new)) == (True, True)
    let_time_pass(api, 2)
    assert (works(api, old), works(api, new)) == (False, True)


@pytest.mark.parametrize("kind", ["tokens", "nodes"])
def test_old_secrets_can_be_ended_before_their_grace(api: Api, kind: str) -> None:
    rotate, end = ("rotate-key", "end-old-keys") if kind == "nodes" else ("rotate", "end-old")
    name = f"ended-{kind}"
    held = [api.worker_of(name) if kind == "nodes" else api.token(name, "read")]
    held += [bearer(admin(api, f"/v1/{kind}/{name}:{rotate}").json()["secret"]) for _ in range(2)]
    assert [works(api, one) for one in held] == [True, True, True]
    assert api.client.post(f"/v1/{kind}/{name}:{end}", headers=api.admin).is_success
    assert [works(api, one) for one in held] == [False, False, True]


def test_a_later_rotation_never_lengthens_an_earlier_grace(api: Api) -> None:
    old = api.token("twice", "read")
    admin(api, "/v1/tokens/twice:rotate", grace_s=10)
    admin(api, "/v1/tokens/twice:rotate", grace_s=5000)
    let_time_pass(api, 11)
    assert not works(api, old)


def test_a_cached_secret_does_not_outlive_its_grace(api: Api) -> None:
    old = api.token("short", "read")["Authorization"].removeprefix("Bearer ")
    admin(api, "/v1/tokens/short:rotate", grace_s=2)
    fresh = Authenticator(api.store)
    assert fresh.lookup(old).name == "short"
    assert fresh.cached(old) is not None
    until(lambda: fresh.cached(old) is None)
    until(lambda: "was replaced, and its grace period is over" in refusal(fresh, old))  # by the database's own clock
    assert fresh.cached(old) is None


def refusal(authenticator: Authenticator, secret: str) -> str:
    """Return why a secret is refused; nothing if it is not."""
    try:
        authenticator.lookup(secret)
    except Unauthorized as error:
        return str(error)
    return ""


def test_a_name_is_taken_until_it_is_revoked_and_then_somebody_else(api: Api) -> None:
    first = api.token("ada", "submit")
    made = submit(api, first, "ada-1").json()["id"]
    assert admin(api, "/v1/tokens", name="ada", scope="read").status_code == 409
    assert admin(api, "/v1/tokens/ada:revoke", reason="left").status_code == 204
    assert not works(api, first)
    second = api.token("ada", "submit")
    foreign = api.client.post(f"/v1/ablations/{made}:cancel", headers=second)
    assert (foreign.status_code, foreign.json()["type"]) == (403, "urn:ablate:problem:not-owner")
    rows = [row for row in api.get("/v1/tokens").json()["items"] if row["name"] == "ada"]
    assert sorted((row["reason"], len(row["secrets"])) for row in rows if row["reason"]) == [("left", 0)]
    assert [len(row["secrets"]) for row in rows if row["reason"] is None] == [1]
    api.cancel(made)


def test_two_who_create_one_name_at_once_make_one(api: Api) -> None:
    got = at_once(lambda _: admin(api, "/v1/nodes", name="raced").status_code, 4)
    assert sorted(got) == [201, 409, 409, 409]


def test_no_token_has_the_scope_or_the_name_of_a_node(api: Api) -> None:
    assert admin(api, "/v1/tokens", name="sly", scope="worker").status_code == 422
    assert admin(api, "/v1/tokens", name="node/x", scope="read").status_code == 422
    assert admin(api, "/v1/nodes", name="gpu", node_class="cpuu").json()["errors"][0]["hint"] == "did you mean 'cpu'?"
    for wrong in ({"grace_s": -1}, {"grace_s": 1e12}, {"grace": 5}, {"grace_s": "NaN"}):
        assert admin(api, "/v1/nodes/gpu:rotate-key", **wrong).status_code == 422, wrong


def test_a_key_registers_only_its_node_and_class_and_a_living_node_keeps_its_own(api: Api) -> None:
    key = bearer(admin(api, "/v1/nodes", name="strict", node_class="cpu").json()["secret"])
    free = api.worker_of("loose")

    def register(headers: dict[str, str], name: str, node_class: str) -> httpx.Response:
        body = {"node_class": node_class, "devices": [], "versions": {}, "code_digest": "c", "public_key": SIGNER.key}
        return api.client.put(f"/v1/nodes/{name}", headers=headers, json=body)

    assert "was issued for class 'cpu'" in register(key, "strict", "h200").json()["detail"]
    assert "cannot register 'loose'" in register(key, "loose", "cpu").json()["detail"]
    node_id = register(free, "loose", "cpu").json()["node_id"]
    taken = register(free, "loose", "h200")
    assert (taken.status_code, taken.json()["type"]) == (409, "urn:ablate:problem:node-taken")
    assert "'loose' is of class 'cpu' and was heard" in taken.json()["detail"]
    with api.store.write() as connection:
        connection.execute(text("UPDATE nodes SET seen_at = seen_at - 1000 WHERE name = 'loose'"))
    assert register(free, "loose", "h200").json()["node_id"] == node_id


def test_the_settings_tokens_are_changed_in_the_settings_alone(api: Api) -> None:
    for path in ("/v1/tokens/admin:rotate", f"/v1/nodes/{NODE}:rotate-key"):
        answer = admin(api, path)
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:ablate:problem:token-of-settings")
    assert "ABLATE_WORKER_TOKEN" in answer.json()["detail"]
    assert admin(api, "/v1/tokens/admin:revoke", reason="x").status_code == 409
    assert admin(api, "/v1/tokens/admin:set-quota", device_minutes=1).status_code == 409


def test_identity_says_who_asks(api: Api) -> None:
    asker = api.client.get("/v1/identity", headers=api.worker).json()
    assert (asker["name"], asker["scope"], asker["node"], asker["node_class"]) == (f"node/{NODE}", "worker", NODE, None)
    assert api.get("/v1/identity").json()["name"] == "admin"


def test_quota_refuses_what_comes_after_it_is_used_up(api: Api) -> None:
    small = {"limits__device_minutes": 1.0}
    headers = api.token("frugal", "submit", device_minutes=3.0)
    first = submit(api, headers, "q-1", **small)
    assert first.status_code == 202
    node = api.register("worker-of-frugal")
    for _ in range(100):  # whatever waited before is taken first
        block = api.claimed(node)
        if block["ablation_id"] == first.json()["id"]:
            break
        api.cancel(block["ablation_id"])
        api.attempt(block, "report", failure_class="cancelled", message="x")
    _spend(api, block["attempt_id"], minutes=1.9)
    assert submit(api, headers, "q-2", **small).status_code == 202
    _spend(api, block["attempt_id"], minutes=2.5)
    refused = submit(api, headers, "q-3", **small)
    assert (refused.status_code, refused.json()["type"]) == (403, "urn:ablate:problem:quota-used-up")
    assert "ablate admin tokens quota frugal --device-minutes " in refused.json()["detail"]
    detail = refused.json()["detail"]
    assert "have used 2.5 device minutes" in detail
    assert "this one among them, may use 2.0 more; it has 3." in detail
    assert submit(api, headers, "q-1", **small).content == first.content, "an answer that was given stays"
    assert submit(api, api.token("rich", "submit"), "q-4").status_code == 202
    api.attempt(block, "report", failure_class="infra_node", message="x")
    rows = {row["name"]: row for row in api.get("/v1/tokens").json()["items"]}
    assert 2.5 <= rows["frugal"]["device_minutes_used"] < 2.6
    assert (rows["rich"]["device_minutes_used"], rows["rich"]["device_minutes_reserved"]) == (0, 180)
    assert admin(api, "/v1/tokens/frugal:set-quota", device_minutes=None).status_code == 200
    assert submit(api, headers, "q-5").status_code == 202


def test_a_submission_reserves_what_it_may_use_until_it_is_over(api: Api) -> None:
    headers = api.token("planner", "submit", device_minutes=100.0)
    ask = {"limits__device_minutes": 60.0}
    first = submit(api, headers, "r-1", **ask)
    assert first.status_code == 202
    assert submit(api, headers, "r-2", **ask).status_code == 403
    assert submit(api, headers, "r-3", limits__device_minutes=40.0).status_code == 202, "exactly the rest"
    assert api.client.get("/v1/identity", headers=headers).json()["device_minutes_reserved"] == 100
    api.cancel(first.json()["id"])
    assert submit(api, headers, "r-4", **ask).status_code == 202, "what was cancelled needs nothing any more"


def test_submissions_at_once_do_not_reserve_the_same_minutes(api: Api) -> None:
    headers = api.token("hasty", "submit", device_minutes=100.0)
    statuses = at_once(lambda n: submit(api, headers, f"h-{n}", limits__device_minutes=30.0).status_code, 12)
    assert sorted(statuses) == [202] * 3 + [403] * 9


def _spend(api: Api, attempt_id: str, *, minutes: float) -> None:
    with api.store.write() as connection:
        change = update(attempts).where(attempts.c.id == attempt_id)
        connection.execute(change.values(started_at=db_now() - 60 * minutes))


def test_a_node_holds_as_many_blocks_as_it_has_devices_whoever_asks_at_once(api: Api) -> None:
    made = [api.submit()["id"] for _ in range(3)]
    node = api.register("three", devices=3)
    headers, ask = api.worker_of("three"), {"node_id": node}
    answers = at_once(lambda _: api.client.post("/v1/blocks:claim", headers=headers, json=ask), 10)
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [409] * 7
    busy = next(answer for answer in answers if answer.status_code == 409).json()
    assert busy["type"] == "urn:ablate:problem:node-busy"
    assert f"node {node} has 3 devices and holds blk_" in busy["detail"]
    with api.store.read() as connection:
        held = connection.execute(select(blocks.c.id).where(blocks.c.node_id == node, blocks.c.state == "running"))
        assert len(held.all()) == 3
    for ablation in made:
        api.cancel(ablation)


def test_no_node_calls_itself_larger_than_any_machine(api: Api) -> None:
    """It would hold the whole queue."""
    body = {"node_class": "cpu", "versions": {}, "code_digest": "sha256:c", "public_key": SIGNER.key}
    devices = [{"index": number, "name": "test", "memory_bytes": 1} for number in range(65)]
    assert api.put_node("large", {**body, "devices": devices[:64]}).status_code == 200
    answer = api.put_node("large", {**body, "devices": devices})
    assert answer.status_code == 422
    assert "at most 64 items" in answer.text


@pytest.mark.parametrize("verb", ["heartbeat", "report"])
def test_a_fencing_token_is_the_very_text(api: Api, verb: str) -> None:
    made = api.submit()
    block = api.claimed(api.register("fenced"))
    body = {} if verb == "heartbeat" else {"failure_class": "preempted", "message": "x"}
    good = block["token"]
    for wrong in (1, 1.0, True, None, good[:-1], good + "A", f" {good}", [good], good.encode().hex()):
        assert api.attempt({**block, "token": wrong}, verb, **body).status_code == 422, wrong
    swapped = good.swapcase() if good.swapcase() != good else good[::-1]
    refused = api.attempt({**block, "token": swapped}, verb, **body)
    assert refused.status_code == 409
    assert good not in refused.text
    assert swapped not in refused.text
    assert api.attempt(block, verb, **body).status_code == 200
    api.cancel(made["id"])


def test_fencing_tokens_never_repeat(api: Api) -> None:
    with api.store.read() as connection:
        known = list(connection.execute(select(attempts.c.token)).scalars())
    assert len(known) == len(set(known)) > 5
    assert {len(token) for token in known} == {22}


def test_each_node_has_its_own_rate(tmp_path: Path) -> None:
    with running_api("sqlite", tmp_path, rate_limit_per_s=0.01, rate_limit_burst=4) as api:
        first, second = api.worker_of("one"), api.worker_of("two")
        asked = [api.client.get("/v1/identity", headers=first).status_code for _ in range(5)]
        assert asked == [200] * 4 + [429]
        assert works(api, second)


@pytest.fixture(params=KINDS)
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    store = Store(database_url(request.param, tmp_path))
    upgrade(store)
    yield store
    store.close()


def who(store: Store, secret: str) -> str | None:
    try:
        principal = Authenticator(store).lookup(secret)
    except Unauthorized:
        return None
    return f"{principal.scope} {principal.name}"


def test_secrets_of_the_settings_follow_the_settings(empty: Store, tmp_path: Path) -> None:
    bootstrap(empty, settings_for(empty.url, tmp_path))
    assert (who(empty, ADMIN), who(empty, WORKER)) == ("admin admin", f"worker node/{NODE}")
    bootstrap(empty, settings_for(empty.url, tmp_path, admin_token="another-secret-of-admin", node_name="moved"))
    assert (who(empty, ADMIN), who(empty, "another-secret-of-admin")) == (None, "admin admin")
    assert who(empty, WORKER) == "worker node/moved"
    ids = Authenticator(empty).lookup("another-secret-of-admin")
    bootstrap(empty, settings_for(empty.url, tmp_path, host="0.0.0.0", worker_token=None))  # noqa: S104 - not opened
    assert (who(empty, ADMIN), who(empty, WORKER)) == ("admin admin", None)
    again = Authenticator(empty).lookup(ADMIN)
    assert again.token_id == ids.token_id, "ownership and quotas stay with the administrator"


def test_settings_that_collide_with_an_issued_key_are_refused(empty: Store) -> None:
    with empty.write() as connection:
        secret = create(connection, node_token("gpu-7", "h200"), by="ada")
    with (
        pytest.raises(ConfigurationError, match=r"'node/gpu-7', but ada created another one"),
        empty.write() as connection,
    ):
        replace_settings_tokens(connection, [(node_token("gpu-7"), WORKER)])
    with pytest.raises(ConfigurationError, match="belongs to another token"), empty.write() as connection:
        replace_settings_tokens(connection, [(NewToken(name="admin", scope=Scope.ADMIN), secret)])


def test_several_processes_start_at_once_with_the_same_settings(empty: Store, tmp_path: Path) -> None:
    def start(_: int) -> None:
        store = Store(empty.url)
        try:
            bootstrap(store, settings_for(empty.url, tmp_path))
        finally:
            store.close()

    at_once(start, 6)
    assert (who(empty, ADMIN), who(empty, WORKER)) == ("admin admin", f"worker node/{NODE}")


def test_generated_secrets_are_kept_for_this_user_only(tmp_path: Path) -> None:
    home = tmp_path / "home"
    settings = settings_for(database_url("sqlite", tmp_path), home, admin_token=None, worker_token=None)
    with TestClient(create_app(settings)) as client:
        for name, shown in (("admin", "admin"), ("worker", f"node/{NODE}")):
            path = home / "tokens" / name
            assert path.stat().st_mode & 0o077 == 0
            answer = client.get("/v1/identity", headers=bearer(path.read_text().strip()))
            assert answer.json()["name"] == shown
