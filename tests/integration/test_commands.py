"""Specs with a command at the service: who may submit them, and which nodes get their blocks."""

from typing import Any

import pytest

from tests.api_stack import SIGNER, Api, api_fixture
from tests.factories import spec_values

api = api_fixture()


def command(**changes: Any) -> dict[str, Any]:
    workload = {"command": ["python", "train.py"], "code": "/srv/lab", "steps": {"timed": 4}, **changes}
    return spec_values(workload=workload, baseline={}, variants={"fused": {"args": ["--fused"]}})


def registered(api: Api, name: str, lanes: dict[str, str | None] | None) -> str:
    body = {"node_class": "cpu", "devices": [], "versions": {}, "code_digest": "sha256:c", "public_key": SIGNER.key}
    answer = api.put_node(name, {**body, "lanes": lanes})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["node_id"])


@pytest.mark.parametrize(("scope", "status"), [("read", 403), ("submit", 403), ("code", 202), ("operate", 202)])
def test_a_command_needs_the_scope_code(api: Api, scope: str, status: int) -> None:
    headers = {**api.token("ada", scope), "Idempotency-Key": f"key-{scope}"}
    answer = api.client.post("/v1/ablations", json=command(), headers=headers)
    assert answer.status_code == status, answer.text
    if scope == "submit":
        assert "scope 'code'" in answer.json()["detail"]
        recipe = api.client.post("/v1/ablations", json=spec_values(), headers={**headers, "Idempotency-Key": "another"})
        assert recipe.status_code == 202


def test_a_command_goes_only_to_nodes_that_take_it_in_its_python_environment(api: Api) -> None:
    plain = api.post_spec(command()).json()["id"]
    lab = api.post_spec(command(environment="lab")).json()["id"]
    for name, lanes in (
        ("untried", None),
        ("scans", {"reference": None}),
        ("refuses", {"reference": None, "command": "this node takes no commands (ABLATE_ACCEPT_CODE)"}),
    ):
        assert api.claim(registered(api, name, lanes)) is None
    waits = api.get(f"/v1/ablations/{plain}").json()["waiting_for"]
    assert "'untried' takes no commands" in waits
    assert "'refuses' takes no commands; start its worker with ABLATE_ACCEPT_CODE=true" in waits
    first = api.claimed(registered(api, "takes", {"reference": None, "command": None}))
    assert first["ablation_id"] == plain
    assert first["trials"][0]["config"]["command"] == ["python", "train.py"]
    waits = api.get(f"/v1/ablations/{lab}").json()["waiting_for"]
    assert "'takes' takes no commands in Python environment 'lab' (ABLATE_ENVIRONMENTS)" in waits
    api.claimed(registered(api, "both", {"command": None, "command:lab": None, "command:more": None}))
    assert api.claim(registered(api, "only", {"command:lab": None}))["ablation_id"] == lab  # type: ignore[index]


def test_a_command_goes_only_to_nodes_with_all_of_its_secrets(api: Api) -> None:
    needs = api.post_spec(command(secrets=["HF_TOKEN", "HF_TOKEN_2"])).json()["id"]
    both = {"command": None, "secret:HF_TOKEN": None, "secret:HF_TOKEN_2": None}
    for number, names in enumerate(((), ("HF_TOKEN",), ("HF_TOKEN_2",), ("HF", "TOKEN", "XHF_TOKEN", "HF_TOKEN_22"))):
        lanes = {"command": None, **{f"secret:{name}": None for name in names}}
        assert api.claim(registered(api, f"lacks-{number}", lanes)) is None
    waits = api.get(f"/v1/ablations/{needs}").json()["waiting_for"]
    assert "'lacks-0' has no secret HF_TOKEN and HF_TOKEN_2 (ABLATE_SECRETS)" in waits
    assert "'lacks-1' has no secret HF_TOKEN_2 (ABLATE_SECRETS)" in waits
    block = api.claimed(registered(api, "has-both", {**both, "secret:MORE": None}))
    assert block["trials"][0]["config"]["secrets"] == ["HF_TOKEN", "HF_TOKEN_2"]
    plan = api.client.post("/v1/ablations:plan", json=command(secrets=["A"]), headers=api.token("ada", "code"))
    assert "'has-both' has no secret A (ABLATE_SECRETS)" in plan.text


def test_a_command_over_several_nodes_goes_only_to_workers_with_as_many(api: Api) -> None:
    alone = {**command(), "limits": {"device_minutes": 100_000}}
    over_two = {**alone, "placement": {"node_class": "cpu", "nodes": 2}}
    two, one = api.post_spec(over_two).json()["id"], api.post_spec(alone).json()["id"]
    waits = {row["nodes_each"]: row for row in api.get("/v1/waiting").json()["items"]}
    assert waits.keys() == {1, 2}
    assert waits[2]["device_minutes"] == 2 * waits[1]["device_minutes"] > 0
    shown = api.client.get("/metrics").text
    assert 'ablate_waiting_nodes{devices="1",node_class="cpu",nodes_each="2"} 0.0' in shown
    assert api.claim(registered(api, "alone", {"command": None}))["ablation_id"] == one  # type: ignore[index]
    assert api.claim(registered(api, "three", {"command*3": None})) is None
    reason = api.get(f"/v1/ablations/{two}").json()["waiting_for"]
    assert "'alone' has 1 node of a cluster, and a block needs 2" in reason
    assert "'three' has 3 nodes of a cluster, and a block needs 2" in reason
    block = api.claimed(registered(api, "pair", {"command*2": None, "secret:KEY": None}))
    assert (block["ablation_id"], block["trials"][0]["config"]["nodes"]) == (two, 2)


def test_a_node_with_secrets_takes_commands_that_need_none(api: Api) -> None:
    api.post_spec(command())
    assert api.claim(registered(api, "has", {"command": None, "secret:HF_TOKEN": None})) is not None


def test_a_node_without_commands_still_takes_recipes_beside_waiting_commands(api: Api) -> None:
    api.post_spec(command())
    recipe = api.submit()["id"]
    block = api.claimed(registered(api, "scans", {"reference": None}))
    assert block["ablation_id"] == recipe


def gpus(api: Api, name: str, count: int) -> str:
    devices = [{"index": index, "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 2**36} for index in range(count)]
    body = {"node_class": "h100", "devices": devices, "versions": {}, "code_digest": "sha256:c"}
    answer = api.put_node(name, {**body, "public_key": SIGNER.key, "lanes": {"command": None}})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["node_id"])


def free(api: Api, name: str) -> int:
    return int(next(row for row in api.get("/v1/nodes").json()["items"] if row["name"] == name)["devices_free"])


def test_a_command_on_several_devices_waits_for_a_node_that_has_them_free(api: Api) -> None:
    pair = api.post_spec(command() | {"placement": {"node_class": "h100", "devices": 2}}).json()["id"]
    assert api.claim(gpus(api, "one", 1)) is None
    assert "'one' has 1 device, and a block needs 2" in api.get(f"/v1/ablations/{pair}").json()["waiting_for"]
    three = gpus(api, "three", 3)
    first = api.claimed(three)
    assert first["trials"][0]["config"]["devices"] == 2
    assert (free(api, "one"), free(api, "three")) == (1, 1)
    assert api.claim(three) is None, "one device is free, and every waiting block needs two"
    single = api.post_spec(command() | {"placement": {"node_class": "h100"}}, key="single").json()["id"]
    second = api.claimed(three)
    assert second["ablation_id"] == single
    assert free(api, "three") == 0
    api.attempt(first, "report", failure_class="preempted", message="the worker was asked to stop")
    assert free(api, "three") == 2


def test_more_devices_than_any_node_of_the_class_could_have_are_refused(api: Api) -> None:
    answer = api.post_spec(command() | {"placement": {"node_class": "h100", "devices": 9}})
    assert answer.status_code == 422, answer.text
    assert "#/placement/devices" in answer.text
    assert "9 devices for one trial are not available on node class 'h100'; allowed: 1, 2, 3" in answer.text
