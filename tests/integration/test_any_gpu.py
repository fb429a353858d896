"""GPUs that no table lists: from their driver to a node, and from each form of a placement to a claimed block."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.analysis.guards import receipt_problems
from ablate.experiments.design.load import parse_spec
from ablate.experiments.records.receipt_check import verify
from ablate.workers.errors import BlockBroken
from ablate.workers.node import find_node
from tests.api_stack import SIGNER, Api, api_fixture
from tests.bundles import make_file
from tests.factories import GIB, spec_values
from tests.nvidia_gpus import FakeGpu, put_driver, put_smi
from tests.trial_files import left_behind

api = api_fixture(kinds=["sqlite"])

GPUS = {
    "a100-80gb": ("NVIDIA A100-SXM4-80GB", 80),
    "rtx-4090": ("NVIDIA GeForce RTX 4090", 24),
    "h100": ("NVIDIA H100 80GB HBM3", 80),
}


@pytest.fixture
def nodes(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Register a node with each GPU, as its worker would; return their ids by class."""
    ids = {"cpu": api.register("node-cpu")}
    for name, (device, gib) in GPUS.items():
        put_driver(tmp_path, monkeypatch, [FakeGpu(name=device, uuid=f"GPU-{name}", total=gib * GIB)])
        node = find_node(f"node-{name}")
        assert node.node_class.name == name
        answer = api.put_node(node.name, node.registration(SIGNER.key).model_dump(mode="json"))
        assert answer.status_code == 200, answer.text
        ids[name] = answer.json()["node_id"]
    return ids


def without_placement(placement: Mapping[str, Any] | None) -> dict[str, Any]:
    values = spec_values()
    del values["placement"]
    return values | ({} if placement is None else {"placement": dict(placement)})


@pytest.mark.parametrize(
    ("placement", "node_class"),
    [
        ({"node_class": "rtx-4090"}, "rtx-4090"),
        ({"gpu": "A100*"}, "a100-80gb"),
        ({"gpu": "any"}, "rtx-4090"),  # as many nodes of each, and this one has least memory
        ({"gpu": "any", "memory": "40GiB"}, "a100-80gb"),
        ({"gpu": "H*", "memory": "80GiB"}, "h100"),
        ({"gpu": "RTX 4090"}, "rtx-4090"),
    ],
    ids=str,
)
def test_a_placement_goes_from_post_to_claim(
    api: Api, nodes: dict[str, str], placement: dict[str, Any], node_class: str
) -> None:
    answer = api.post_spec(without_placement(placement))
    assert answer.status_code == 202, answer.text
    made = answer.json()
    stored = api.get(f"/v1/ablations/{made['id']}").json()
    assert stored["node_class"] == node_class
    assert all(api.claim(node_id) is None for name, node_id in nodes.items() if name != node_class)
    block = api.claimed(nodes[node_class])
    assert block["ablation_id"] == made["id"]
    text = api.get(f"/v1/ablations/{made['id']}/spec").json()
    assert parse_spec(text["text"].encode(), text["content_type"]).placement.node_class == node_class


def test_a_spec_without_a_placement_takes_the_only_kind_or_is_refused_with_the_list(api: Api) -> None:
    refused = api.post_spec(without_placement(None))
    assert refused.status_code == 422
    assert "no node is known that could choose one" in refused.text
    on_cpu = api.register()
    made = api.post_spec(without_placement(None)).json()
    block = api.claimed(on_cpu)
    assert block["ablation_id"] == made["id"]
    api.register("node-b", "rtx-4090", devices=1)
    (problem,) = api.post_spec(without_placement(None)).json()["errors"]
    assert "several kinds of machines: cpu (0.0 GiB, 1 of its nodes take work), rtx-4090 (0.0 GiB" in problem["detail"]
    assert problem["hint"] == "write placement: {node_class: cpu}"


def test_the_same_key_gets_the_same_answer_although_another_class_would_be_chosen_now(api: Api) -> None:
    values = without_placement({"gpu": "any"})
    api.register("node-a", "rtx-4090", devices=1)
    first = api.post_spec(values, key="one").json()
    for name in ("node-b", "node-c"):
        api.register(name, "a100-80gb", devices=1)
    assert api.post_spec(values, key="one").json() == first
    assert api.get(f"/v1/ablations/{first['id']}").json()["node_class"] == "rtx-4090"
    later = api.post_spec(values, key="two").json()
    assert api.get(f"/v1/ablations/{later['id']}").json()["node_class"] == "a100-80gb"


def test_a_gpu_that_nobody_has_is_refused_until_it_gets_a_key(api: Api) -> None:
    api.register("node-a", "a100-80gb", devices=1)
    for path in ("/v1/ablations:plan", "/v1/ablations"):
        headers = {**api.admin, "Idempotency-Key": "k"}
        answer = api.client.post(path, headers=headers, json=without_placement({"node_class": "a100-40gb"}))
        assert answer.status_code == 422, answer.text
        (problem,) = answer.json()["errors"]
        assert "no node of class 'a100-40gb' is known here; known: a100-80gb (0.0 GiB, 1" in problem["detail"]
    made = api.client.post("/v1/nodes", headers=api.admin, json={"name": "late", "node_class": "a100-40gb"})
    assert made.status_code == 201, made.text
    answer = api.post_spec(without_placement({"node_class": "a100-40gb"}))
    assert answer.status_code == 202
    assert any("waits for a live node of class 'a100-40gb'" in one for one in answer.json()["warnings"])


@pytest.mark.parametrize("name", ["cpuu", "tpu-v9", "RTX", "a100_80"])
def test_a_name_that_no_gpu_has_registers_nothing(api: Api, name: str) -> None:
    body = {"name": "late", "node_class": name}
    answer = api.client.post("/v1/nodes", headers=api.admin, json=body)
    assert answer.status_code == 422
    assert f"unknown node class '{name}'; known: cpu, h200" in answer.text


def test_a_plan_says_which_of_the_kinds_here_could_run_it(api: Api, nodes: dict[str, str]) -> None:
    plan = api.client.post("/v1/ablations:plan", headers=api.admin, json=without_placement({"gpu": "RTX*"})).json()
    assert plan["node_class"] == "rtx-4090"
    rows = {row["node_class"]: row for row in plan["node_classes"]}
    assert set(GPUS) | {"cpu", "h200"} <= set(rows)
    assert [name for name, row in rows.items() if row["eligible"]] == ["rtx-4090"]
    assert rows["a100-80gb"]["reason"] == "the spec asks for node class 'rtx-4090'"
    assert nodes


@pytest.mark.parametrize(
    ("apps", "without", "problem"),
    [
        ((), (), None),
        ((), ("ClockInfo", "Serial"), None),
        ([(4711, "GPU-1")], (), "foreign process on the device during the trial"),
        ((), ("ComputeRunningProcesses",), "the node did not report foreign_processes"),
    ],
    ids=["free", "no clock", "shared", "hidden"],
)
def test_a_receipt_of_any_gpu_is_guarded_by_what_its_driver_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    apps: list[tuple[int, str]],
    without: tuple[str, ...],
    problem: str | None,
) -> None:
    gpu = FakeGpu(name="NVIDIA GeForce RTX 3080", uuid="GPU-1", serial="7", total=10 * GIB, without=frozenset(without))
    put_driver(tmp_path, monkeypatch, [gpu], apps=apps)
    put_smi(tmp_path, monkeypatch, 'echo "[N/A], [N/A], [N/A], [N/A], [N/A]"')
    node, file = find_node("far"), make_file(placement={"node_class": "rtx-3080"})
    assert any("does not count its slow-downs" in one for one in node.lacks)
    block = file.claimed(0, attempt_id="att_1", attempt_no=1)
    record = left_behind(block, node, tmp_path)
    if problem is not None:
        with pytest.raises(BlockBroken, match=problem):
            record.receipt()
        return
    receipt = record.receipt()
    assert verify(receipt.model_dump(mode="json")) == []
    assert receipt_problems(receipt, file.plan) == []
    assert (receipt.environment.node_class, receipt.environment.peak_flops) == ("rtx-3080", None)
    assert receipt.environment.device_serial == ("GPU-1" if "Serial" in without else "7")
    assert receipt.summary is not None
    assert receipt.summary.mfu is None
