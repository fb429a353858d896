"""Who may do what: every operation of the REST interface times every kind of principal, against a table by hand."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.api_stack import ADMIN, SIGNER, Api, bearer, running_api, signed
from tests.bundles import make_file
from tests.factories import spec_values

NO_TOKEN = {"nobody", "stranger", "revoked", "replaced"}
READ = {"reader", "owner", "other", "coder", "operator", "admin"}
SUBMIT = {"owner", "other", "coder", "operator", "admin"}
CODE = {"coder", "operator", "admin"}
OWN = {"owner", "operator", "admin"}
OPERATE = {"operator", "admin"}
ADMINS = {"admin"}
NODE_A = {"node-a"}
ENROLLER = {"enroller"}
EVERYBODY = READ | ENROLLER | {"node-a", "node-b"}
PRINCIPALS = EVERYBODY | NO_TOKEN


@dataclass(frozen=True)
class Ask:
    """One request."""

    method: str
    path: str
    json: Any = None
    headers: dict[str, str] = field(default_factory=dict)


class World:
    """An API with every kind of principal, and fresh things for them to ask for."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.node = api.register("node-a")
        api.register("node-b")
        self.headers = {
            "nobody": {},
            "stranger": bearer("a-secret-that-nobody-was-given"),
            "revoked": self._revoked(),
            "replaced": self._replaced(),
            "reader": api.token("reader", "read"),
            "owner": api.token("owner", "submit"),
            "other": api.token("other", "submit"),
            "coder": api.token("coder", "code"),
            "operator": api.token("operator", "operate"),
            "admin": api.token("second-admin", "admin"),
            "node-a": api.worker_of("node-a"),
            "node-b": api.worker_of("node-b"),
            "enroller": bearer(self._enrolment()["secret"]),
        }
        self._number = 0

    def _enrolment(self) -> dict[str, Any]:
        """A token with which `enroller` makes nodes."""
        answer = self._admin("/v1/enrolments", {"node_class": "cpu", "uses": 100})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def enrolment(self) -> str:
        return str(self._enrolment()["name"]).replace("/", "%2F")

    def _revoked(self) -> dict[str, str]:
        headers = self.api.token("gone", "admin")
        assert self._admin("/v1/tokens/gone:revoke", {"reason": "left"}).status_code == 204
        return headers

    def _replaced(self) -> dict[str, str]:
        headers = self.api.token("changed", "admin")
        assert self._admin("/v1/tokens/changed:rotate", {"grace_s": 0}).status_code == 200
        return headers

    def _admin(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.api.client.post(path, headers=bearer(ADMIN), json=body)

    def fresh(self, prefix: str) -> str:
        self._number += 1
        return f"{prefix}-{self._number}"

    def ablation(self) -> str:
        """An ablation of `owner` that waits."""
        headers = {**self.headers["owner"], "Idempotency-Key": self.fresh("key")}
        answer = self.api.client.post("/v1/ablations", headers=headers, json=spec_values())
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def over(self) -> str:
        ablation = self.ablation()
        assert self.api.cancel(ablation).status_code == 202
        return ablation

    def trial(self) -> str:
        return str(self.api.get(f"/v1/ablations/{self.over()}/trials?limit=1").json()["items"][0]["id"])

    def attempt(self) -> dict[str, Any]:
        """A block that node-a holds."""
        self.ablation()
        return self.api.claimed(self.node)

    def token(self) -> str:
        name = self.fresh("token")
        self.api.token(name, "read")
        return name

    def added_node(self) -> str:
        name = self.fresh("node")
        self.api.worker_of(name)
        return name

    def registered_node(self) -> str:
        name = self.fresh("node")
        self.api.register(name)
        return name

    def known_key(self) -> str:
        return SIGNER.key


def _of_ablation(path: str, method: str = "GET") -> Callable[[World], Ask]:
    return lambda world: Ask(method, f"/v1/ablations/{world.over()}{path}")


def _of_attempt(verb: str, **body: Any) -> Callable[[World], Ask]:
    def ask(world: World) -> Ask:
        block = world.attempt()
        message = {"token": block["token"], **body}
        whole = signed(block, message) if verb == "report" else message
        return Ask("POST", f"/v1/attempts/{block['attempt_id']}:{verb}", whole)

    return ask


def _of_token(verb: str, **body: Any) -> Callable[[World], Ask]:
    return lambda world: Ask("POST", f"/v1/tokens/{world.token()}:{verb}", body)


def _of_node(verb: str, **body: Any) -> Callable[[World], Ask]:
    return lambda world: Ask("POST", f"/v1/nodes/{world.added_node()}:{verb}", body)


def _stop_or_go(verb: str, **body: Any) -> Callable[[World], Ask]:
    return lambda world: Ask("POST", f"/v1/nodes/{world.registered_node()}:{verb}", body or None)


def _submit(world: World) -> Ask:
    return Ask("POST", "/v1/ablations", spec_values(), {"Idempotency-Key": world.fresh("key")})


def _session(world: World) -> str:
    """Open a session of `owner`."""
    name = world.fresh("session")
    headers = world.headers["owner"]
    answer = world.api.client.post(f"/v1/sessions/{name}:open", headers=headers, json=_proposal())
    assert answer.status_code == 201, answer.text
    return name


def _proposal() -> dict[str, Any]:
    memory = {"metric": "peak_allocated_gib", "margin": "0%", "adopt_if": "1%"}
    return spec_values(variants={"psiv-on": {"gates": {"psiv_cache": True}}}, verdict__primary=memory)


def _try(world: World) -> Ask:
    return Ask("POST", f"/v1/sessions/{_session(world)}:try", _proposal(), {"Idempotency-Key": world.fresh("key")})


def _revoke_share(world: World) -> Ask:
    ablation = world.over()
    made = world.api.client.post(f"/v1/ablations/{ablation}:share", headers=world.headers["owner"], json={})
    assert made.status_code == 201, made.text
    return Ask("POST", f"/v1/ablations/{ablation}/shares/{made.json()['link']['id']}:revoke")


def _enrol(world: World) -> Ask:
    name = world.fresh("enrolled")
    body = {"node_class": "cpu", "key_digest": f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"}
    return Ask("POST", f"/v1/nodes/{name}:enrol", body)


def _claim(world: World) -> Ask:
    world.ablation()
    return Ask("POST", "/v1/blocks:claim", {"node_id": world.node})


NODE = {"node_class": "cpu", "devices": [], "versions": {}, "code_digest": "sha256:c", "public_key": SIGNER.key}
GZIP = {"Content-Type": "application/gzip"}
NO_CODE = f"sha256:{'0' * 64}"
TAR = {"Content-Type": "application/x-tar"}
REGISTERED = Ask("PUT", "/v1/nodes/node-a", {**NODE, "devices": [{"index": 0, "name": "x", "memory_bytes": 1}] * 64})


def _plain(path: str) -> Callable[[World], Ask]:
    return lambda _world: Ask("GET", path)


TABLE: dict[str, tuple[set[str], int, Callable[[World], Ask]]] = {
    "getIdentity": (EVERYBODY, 200, _plain("/v1/identity")),
    "listNodes": (READ, 200, _plain("/v1/nodes")),
    "listWaiting": (READ, 200, _plain("/v1/waiting")),
    "listKeys": (READ, 200, _plain("/v1/keys")),
    "listCalibrations": (READ, 200, _plain("/v1/calibrations")),
    "listAblations": (READ, 200, _plain("/v1/ablations")),
    "findAblation": (READ, 200, lambda w: Ask("GET", f"/v1/ablations:find?name={w.over()}")),
    "getHistory": (READ, 200, _plain("/v1/history/hybrid-tiny")),
    "getAblation": (READ, 200, _of_ablation("")),
    "listBlocks": (READ, 200, _of_ablation("/blocks")),
    "listTrials": (READ, 200, _of_ablation("/trials")),
    "getSpec": (READ, 200, _of_ablation("/spec")),
    "getVerdict": (READ, 409, _of_ablation("/verdict")),
    "getReport": (READ, 409, _of_ablation("/report")),
    "streamEvents": (READ, 200, _of_ablation("/events")),
    "getReceipt": (READ, 409, lambda world: Ask("GET", f"/v1/trials/{world.trial()}/receipt")),
    "getLog": (READ, 200, lambda world: Ask("GET", f"/v1/trials/{world.trial()}/log")),
    "planAblation": (READ, 200, lambda _world: Ask("POST", "/v1/ablations:plan", spec_values())),
    "submitAblation": (SUBMIT, 202, _submit),
    "registerPlan": (SUBMIT, 200, lambda _w: Ask("POST", "/v1/plans:register", make_file().model_dump(mode="json"))),
    "listSessions": (READ, 200, _plain("/v1/sessions")),
    "getSession": (READ, 200, lambda world: Ask("GET", f"/v1/sessions/{_session(world)}")),
    "openSession": (SUBMIT, 201, lambda w: Ask("POST", f"/v1/sessions/{w.fresh('new')}:open", _proposal())),
    "closeSession": (OWN, 200, lambda world: Ask("POST", f"/v1/sessions/{_session(world)}:close")),
    "tryProposal": (OWN, 202, _try),
    "findCode": (CODE, 200, lambda _world: Ask("POST", "/v1/code:find", {"digests": []})),
    "uploadCode": (CODE, 422, lambda _world: Ask("POST", f"/v1/code:upload?digest={NO_CODE}", {}, GZIP)),
    "getCode": (CODE, 404, lambda _world: Ask("GET", f"/v1/code/{NO_CODE}")),
    "shareCode": (OPERATE, 404, lambda w: Ask("POST", f"/v1/ablations/{w.over()}:share-code", {"name": "owner"})),
    "downloadCode": (NODE_A, 404, lambda w: Ask("GET", f"/v1/attempts/{w.attempt()['attempt_id']}/code/{NO_CODE}")),
    "cancelAblation": (OWN, 202, lambda world: Ask("POST", f"/v1/ablations/{world.ablation()}:cancel")),
    "setPriority": (OWN, 200, lambda world: Ask("PATCH", f"/v1/ablations/{world.ablation()}", {"priority": 7})),
    "shareAblation": (OWN, 201, lambda world: Ask("POST", f"/v1/ablations/{world.over()}:share", {"hours": 1})),
    "listShareLinks": (READ, 200, _of_ablation("/shares")),
    "revokeShareLink": (OWN, 200, _revoke_share),
    "addNotification": (SUBMIT, 422, lambda _w: Ask("POST", "/v1/notifications", {"kind": "slack", "target": "x@y"})),
    "listNotifications": (READ, 200, _plain("/v1/notifications")),
    "removeNotification": (SUBMIT, 404, lambda _w: Ask("POST", f"/v1/notifications/ntf_{'0' * 26}:remove")),
    "drainNode": (OPERATE, 200, _stop_or_go("drain")),
    "quarantineNode": (OPERATE, 200, _stop_or_go("quarantine", reason="it smokes")),
    "resumeNode": (OPERATE, 200, _stop_or_go("resume")),
    "importBundles": (OPERATE, 422, lambda _w: Ask("POST", "/v1/ablations:import", {}, TAR)),
    "trustKey": (OPERATE, 200, lambda w: Ask("POST", f"/v1/keys/{SIGNER.key}:trust", {"node": w.fresh("far")})),
    "revokeKey": (OPERATE, 404, lambda _w: Ask("POST", f"/v1/keys/ed25519:{'A' * 43}:revoke", {"reason": "lost"})),
    "createEnrolment": (OPERATE, 201, lambda _world: Ask("POST", "/v1/enrolments", {"node_class": "cpu"})),
    "revokeEnrolment": (
        OPERATE,
        204,
        lambda w: Ask("POST", f"/v1/enrolments/{w.enrolment()}:revoke", {"reason": "it leaked"}),
    ),
    "enrolNode": (ENROLLER, 204, _enrol),
    "leaveNode": (NODE_A, 403, lambda _world: Ask("POST", "/v1/nodes/node-a:leave")),
    "addNode": (OPERATE, 201, lambda world: Ask("POST", "/v1/nodes", {"name": world.fresh("new")})),
    "rotateNodeKey": (OPERATE, 200, _of_node("rotate-key", grace_s=5)),
    "endOldNodeKeys": (OPERATE, 204, _of_node("end-old-keys")),
    "revokeNodeKey": (OPERATE, 204, _of_node("revoke-key", reason="sold")),
    "createSignIn": (READ, 201, lambda _world: Ask("POST", "/v1/sign-ins", {})),
    "listTokens": (OPERATE, 200, _plain("/v1/tokens")),
    "createToken": (ADMINS, 201, lambda w: Ask("POST", "/v1/tokens", {"name": w.fresh("new"), "scope": "read"})),
    "rotateToken": (ADMINS, 200, _of_token("rotate")),
    "endOldSecrets": (ADMINS, 200, _of_token("end-old")),
    "setQuota": (ADMINS, 200, _of_token("set-quota", device_minutes=5)),
    "revokeToken": (ADMINS, 204, _of_token("revoke", reason="left")),
    "registerNode": (NODE_A, 200, lambda _world: REGISTERED),
    "claimBlock": (NODE_A, 200, _claim),
    "heartbeat": (NODE_A, 200, _of_attempt("heartbeat")),
    "reportBlock": (NODE_A, 200, _of_attempt("report", failure_class="infra_node", message="x")),
}
"""By operation: who may, what the good answer is, and a request. Everybody else gets 401 or 403."""
OPEN = {"getHealth", "getReadiness", "getMetrics", "getVersion", "getSpecSchema"}
"""Operations that need no token."""


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with running_api(request.param, tmp_path_factory.mktemp("access")) as api:
        yield World(api)


def send(world: World, ask: Ask, principal: str) -> httpx.Response:
    headers = {**ask.headers, **world.headers[principal]}
    return world.api.client.request(ask.method, ask.path, json=ask.json, headers=headers)


def test_every_operation_has_a_row(world: World) -> None:
    document = world.api.client.get("/openapi.json").json()
    served = {item["operationId"] for path in document["paths"].values() for item in path.values()}
    assert served == set(TABLE) | OPEN


@pytest.mark.parametrize("operation", sorted(TABLE))
def test_only_those_of_the_table_may(world: World, operation: str) -> None:
    allowed, good, make = TABLE[operation]
    ask = make(world)
    statuses = {principal: send(world, ask, principal).status_code for principal in sorted(PRINCIPALS - allowed)}
    assert statuses == {principal: 401 if principal in NO_TOKEN else 403 for principal in sorted(PRINCIPALS - allowed)}
    answers = {principal: send(world, make(world), principal) for principal in sorted(allowed)}
    assert {name: answer.status_code for name, answer in answers.items()} == dict.fromkeys(answers, good)
    assert send(world, ask, min(allowed)).status_code == good, "what was refused has changed nothing"


def test_foreign_attempts_ablations_and_nodes_are_refused_by_name(world: World) -> None:
    block = world.attempt()
    ask = Ask("POST", f"/v1/attempts/{block['attempt_id']}:heartbeat", {"token": block["token"]})
    detail = send(world, ask, "node-b").json()["detail"]
    assert all(word in detail for word in (block["attempt_id"], "'node-a'", "'node-b'"))
    detail = send(world, REGISTERED, "node-b").json()["detail"]
    assert detail.startswith("this key belongs to node 'node-b' and cannot register 'node-a'")
    ablation = world.ablation()
    detail = send(world, Ask("POST", f"/v1/ablations/{ablation}:cancel"), "other").json()["detail"]
    assert all(word in detail for word in (ablation, "'owner'", "'other'", "'operate'"))
