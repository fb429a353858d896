from dataclasses import fields
from typing import Any

import pytest

from experiments.design.arms import _typed
from experiments.design.config_fields import config_to_json
from experiments.design.gate import Claim, Gate, GateValue, show
from experiments.design.gates import GATES
from experiments.design.listings import public_gates
from experiments.design.recipes import RECIPES
from kernels.backends import NODE_CLASSES, Lane
from kernels.scan_switches import ScanFact, ScanSwitches
from model.config import MeshConfig, TrainConfig
from model.facts import ModelFact

OTHER_VALUES = [
    pytest.param(gate, value, id=f"{gate.name}={show(value)}")
    for gate in GATES.values()
    for value in gate.values
    if value != gate.default
]


def flat(value: Any, where: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {where: value}
    return {path: leaf for key, part in value.items() for path, leaf in flat(part, f"{where}.{key}".strip(".")).items()}


@pytest.mark.parametrize("gate", GATES.values(), ids=lambda gate: gate.name)
def test_gate_default_leaves_the_default_configuration_equal(gate: Gate) -> None:
    config = TrainConfig()
    assert gate.apply(config, _typed(gate.name, gate.default)) == config
    assert gate.default in gate.values


@pytest.mark.parametrize(("gate", "value"), OTHER_VALUES)
def test_gate_value_changes_exactly_the_declared_field(gate: Gate, value: GateValue) -> None:
    base = TrainConfig(mesh=MeshConfig(devices=4 if gate.name == "sharding" else 1))  # one device has nothing to divide
    changed = gate.apply(base, _typed(gate.name, value))
    before, after = flat(config_to_json(base)), flat(config_to_json(changed))
    assert {path for path in before if before[path] != after[path]} == {gate.path}
    assert gate.read(changed) == value


@pytest.mark.parametrize("gate", GATES.values(), ids=lambda gate: gate.name)
def test_gate_refers_only_to_known_gates_and_values(gate: Gate) -> None:
    for setting in (gate.requires, *gate.unused_with):
        assert all(GATES[other].allows(value) for other, value in setting.items())
    assert set(gate.lanes) <= set(gate.values)
    assert gate.question.endswith("?")


def test_every_switch_of_the_scan_has_a_gate() -> None:
    assert {f"model.scan.{switch.name}" for switch in fields(ScanSwitches)} <= {gate.path for gate in GATES.values()}


def test_every_fact_of_the_model_is_read_by_a_gate() -> None:
    looked_at = " ".join(gate.attested_by for gate in GATES.values()).split()
    of_no_gate = {ModelFact.DEVICE, ModelFact.KERNELS, ModelFact.MESH_DEVICES, ModelFact.GRAPH_CHANGE}
    assert set(ModelFact) - set(looked_at) == of_no_gate


def test_gate_supports_says_which_lane_is_missing_where() -> None:
    reason = GATES["tma"].supports(NODE_CLASSES["cpu"], Lane.REFERENCE, True)
    assert reason == "gate 'tma' needs lane cuda, which has no implementation on node class 'cpu'"


def test_gate_supports_tells_a_wrong_lane_from_a_missing_one() -> None:
    assert GATES["tma"].supports(NODE_CLASSES["h200"], Lane.CUDA, True) is None
    reason = GATES["tma"].supports(NODE_CLASSES["h200"], Lane.REFERENCE, True)
    assert reason == "gate 'tma' needs lane cuda; this arm runs lane reference"


def test_kernel_gates_have_no_effect_in_another_lane() -> None:
    values = {gate.name: gate.default for gate in GATES.values()}
    for name in (
        "tma",
        "warp_specialize",
        "aggressive_smem_merge",
        "layout_2d",
        "pipeline_stages",
        "fast_math",
        "heads_in_turn",
    ):
        assert GATES[name].unused_because(values) == "lane = reference"
        assert GATES[name].unused_because({**values, "lane": "cuda"}) is None
    sequential = {**values, "lane": "cuda", "schedule": "sequential"}
    assert GATES["superchunk"].unused_because(sequential) == "schedule = sequential"
    assert GATES["chunk_size"].unused_because(sequential) is None


def test_gate_supports_names_the_node_class_that_a_value_needs() -> None:
    reason = GATES["attention"].supports(NODE_CLASSES["cpu"], Lane.REFERENCE, "flash")
    assert (
        reason == "gate 'attention' = flash needs node class h200 or h100 or tpu-v6e or tpu-v6e-compile; this is 'cpu'"
    )
    assert GATES["attention"].supports(NODE_CLASSES["h200"], Lane.REFERENCE, "flash") is None


def test_heads_in_turn_need_the_lifted_walk_unless_they_go_one_by_one() -> None:
    gate = GATES["heads_in_turn"]
    assert gate.needs(4) == {"psiv_cache": False, "aggressive_smem_merge": False}
    assert gate.needs(0) == gate.needs(1) == {}


def test_gate_claims_are_those_of_the_design() -> None:
    claims = {name: gate.claim for name, gate in GATES.items()}
    assert claims["psiv_cache"] is Claim.SCHEDULE_ONLY
    assert claims["schedule"] is claims["chunk_size"] is Claim.RE_ASSOCIATES
    assert claims["dtype"] is Claim.CHANGES_MODEL


def test_psiv_attestation_reads_bytes_and_recomputations() -> None:
    attest = GATES["psiv_cache"].attest
    assert attest({ScanFact.PSIV_SAVED_BYTES: 8}) is True
    assert attest({ScanFact.PSIV_RECOMPUTES: 2}) is False
    assert attest({ScanFact.PSIV_RECOMPUTES: 2, ScanFact.PSIV_SAVED_BYTES: 8}) == "mixed"
    assert attest({}) is None


def test_compile_attestation_needs_a_compiled_graph() -> None:
    attest = GATES["compile"].attest
    assert attest({ModelFact.COMPILED_GRAPHS: 1}) is True
    assert attest({ModelFact.COMPILED_GRAPHS: 0, ModelFact.LOSS: "dense"}) is False
    assert attest({}) is None


def test_catalogue_lists_where_each_value_runs() -> None:
    public = {gate.name: gate for gate in public_gates()}
    assert set(public) == set(GATES)
    with_cuda = tuple(name for name, entry in NODE_CLASSES.items() if Lane.CUDA in entry.lanes)
    assert public["tma"].node_classes == {"false": with_cuda, "true": with_cuda}
    assert public["schedule"].node_classes["sequential"] == tuple(n for n, e in NODE_CLASSES.items() if e.lanes)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_recipe_values_are_gate_values(recipe: Any) -> None:
    assert all(gate.allows(gate.read(recipe.config)) for gate in GATES.values())
