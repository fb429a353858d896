"""A new kind of machine is one entry of the table and its probe: nothing else has to know it."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from ablate.experiments.analysis.guards import receipt_problems
from ablate.experiments.design.listings import public_gates
from ablate.experiments.errors import SpecError
from ablate.experiments.records.messages import DeviceInfo
from ablate.experiments.records.receipt_check import verify
from ablate.kernels.backends import NODE_CLASSES, Lane, NodeClass
from ablate.workers.devices.inventory import PROBES, HostProbe, find_devices
from ablate.workers.devices.probe_types import DeviceState, ProbeResult
from ablate.workers.node import Node, find_node
from ablate.workers.offline.cli import refusals
from ablate.workers.settings import Settings
from tests.api_stack import SIGNER, Api, api_fixture
from tests.bundles import make_file
from tests.factories import GIB, make_spec
from tests.trial_files import left_behind

ENTRY = NodeClass(
    name="sim-9",
    lanes=(Lane.REFERENCE,),
    device_type="cpu",
    probe="sim",
    device_name=r"^Sim 9\b",
    peak_flops={"float32": 2e12},
)


class SimProbe(HostProbe):
    """Finds one device of the new kind."""

    def find(self) -> ProbeResult:
        return ProbeResult(devices=(DeviceInfo(index=3, name="Sim 9 SXM", memory_bytes=80 * GIB),), driver="9.1")

    def memory_used(self) -> Mapping[int, int]:
        return {3: GIB}

    def state(self, index: int) -> DeviceState:
        return DeviceState(hw_power_brake_us=index * 1_000_000, processes=())


@pytest.fixture
def new_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NODE_CLASSES, ENTRY.name, ENTRY)
    monkeypatch.setattr("ablate.workers.devices.inventory.PROBES", {"sim": SimProbe(), **PROBES})


@pytest.fixture
def node(new_class: None) -> Node:
    return find_node("far")


api = api_fixture(kinds=["sqlite"])


def register(api: Api, node: Node) -> str:
    body = node.registration(SIGNER.key).model_dump(mode="json")
    answer = api.put_node(node.name, body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["node_id"])


def test_worker_finds_its_device_by_itself_and_when_asked_for(node: Node) -> None:
    assert (node.node_class, node.versions["driver"]) == (ENTRY, "9.1")
    assert find_devices("sim-9").node_class is ENTRY
    assert find_devices("cpu").node_class is NODE_CLASSES["cpu"]
    assert Settings(node_class="sim-9").node_class == "sim-9"


def test_service_plans_queues_and_hands_out_blocks(api: Api, node: Node) -> None:
    on_cpu, here = api.register(), register(api, node)
    placement = {"node_class": "sim-9"}
    values = make_spec(placement=placement).model_dump(mode="json", exclude_unset=True)
    plan = api.client.post("/v1/ablations:plan", headers=api.admin, json=values).json()
    (eligible,) = [row for row in plan["node_classes"] if row["eligible"]]
    assert (eligible["node_class"], eligible["live_nodes"]) == ("sim-9", 1)
    made = api.submit(placement=placement)
    assert api.claim(on_cpu) is None
    block = api.claimed(here)
    assert block["ablation_id"] == made["id"]
    gates = {gate.name: gate.node_classes for gate in public_gates()}
    assert {"cpu", "h200", "sim-9"} <= set(gates["lane"]["reference"])
    assert "sim-9" not in gates["lane"]["cuda"] + gates["attention"]["flash"]


def test_spec_for_it_is_held_against_its_lanes(node: Node) -> None:
    assert list(refusals(make_file(placement={"node_class": "sim-9"}), node)) == []
    with pytest.raises(SpecError, match="lane 'cuda' has no implementation on node class 'sim-9'"):
        make_file(placement={"node_class": "sim-9"}, variants={"x": {"gates": {"lane": "cuda"}}})
    (refused,) = refusals(make_file(), node)
    assert refused == "this node is of class 'sim-9'; the plan asks for 'cpu'"


def test_receipt_from_it_carries_device_peak_and_events(node: Node, tmp_path: Path) -> None:
    file = make_file(placement={"node_class": "sim-9"})
    block = file.claimed(0, attempt_id="att_1", attempt_no=1)
    receipt = left_behind(block, node, tmp_path).receipt()
    assert verify(receipt.model_dump(mode="json")) == []
    assert (receipt.environment.node_class, receipt.environment.device_name) == ("sim-9", "Sim 9 SXM")
    assert receipt.ids.device == "far/3"
    assert receipt.summary is not None
    assert receipt.summary.mfu == pytest.approx(receipt.summary.model_tflops_per_s / 2)
    assert json.loads(receipt.model_dump_json())["environment"]["throttle"] == {
        "hw_power_brake": 0.0,
        "foreign_processes": [],
    }
    assert receipt_problems(receipt, file.plan) == []
