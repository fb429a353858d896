import json
import random
from dataclasses import asdict, fields
from typing import Any

import pytest

from ablate.experiments.design.gate import Gate, GateValue, show
from ablate.experiments.design.gates import BACK_ENDS, GATES, back_ends_of, with_gates
from ablate.experiments.design.listings import public_gates
from ablate.experiments.design.recipes import RECIPES
from ablate.kernels.backends import NODE_CLASSES, Lane
from ablate.kernels.scan_switches import ScanFact, ScanSwitches
from ablate.model.config import MeshConfig, TrainConfig
from ablate.model.facts import ModelFact

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
    assert with_gates(config, {gate.name: gate.default}) == config
    assert gate.default in gate.values


@pytest.mark.parametrize(("gate", "value"), OTHER_VALUES)
def test_gate_value_changes_exactly_the_declared_field(gate: Gate, value: GateValue) -> None:
    base = TrainConfig(
        mesh=MeshConfig(devices=4 if gate.name == "sharding" else 8 if gate.name.endswith("_parallel") else 1),
        micro_batch=48,
    )
    base = with_gates(base, gate.needs(value))
    changed = with_gates(base, {gate.name: value})
    before, after = flat(asdict(base)), flat(asdict(changed))
    assert {path for path in before if before[path] != after[path]} == {gate.path}
    assert gate.read(changed) == value


@pytest.mark.parametrize("gate", GATES.values(), ids=lambda gate: gate.name)
def test_gate_refers_only_to_known_gates_and_values(gate: Gate) -> None:
    for setting in (gate.requires, *gate.unused_with):
        assert all(GATES[other].allows(value) for other, value in setting.items())
    assert set(gate.lanes) <= set(gate.values)
    assert gate.question.endswith("?")


def test_an_arm_needs_the_back_ends_that_its_gates_name() -> None:
    """Draw values of all gates and find the needed back ends by the names alone."""
    rng = random.Random(7)  # noqa: S311 - draws that repeat
    met: set[str] = set()
    for _ in range(300):
        gates = {gate.name: rng.choice(gate.values) for gate in GATES.values()}
        pattern = rng.choice(["M", "MA", "MAF", "A", "AR"])
        named = {f"{name}={json.dumps(value).strip(chr(34))}" for name, value in gates.items()}
        unused = {name for name, letter in (("attention", "A"), ("recurrence", "R")) if letter not in pattern}
        expected = {name for name in named & set(BACK_ENDS) if name.partition("=")[0] not in unused}
        assert back_ends_of(gates, pattern) == expected
        met |= expected
    assert met == set(BACK_ENDS)
    assert back_ends_of({}, "MA") == set()  # a plan of earlier code


def test_every_switch_of_the_scan_has_a_gate() -> None:
    assert {f"model.scan.{switch.name}" for switch in fields(ScanSwitches)} <= {gate.path for gate in GATES.values()}


def test_every_fact_of_the_model_is_read_by_a_gate() -> None:
    looked_at = " ".join(gate.attested_by for gate in GATES.values()).split()
    of_no_gate = {ModelFact.DEVICE, ModelFact.KERNELS, ModelFact.GRAPH_CHANGE}
    of_no_gate |= {ModelFact.EXPERT_LOAD, ModelFact.EXPERT_ENTROPY, ModelFact.EXPERT_DROPPED}
    of_no_gate |= {
        ModelFact.LOSS_TRIPS,
        ModelFact.LAYER_TRIPS,
        ModelFact.ATTENTION_KERNELS,
    }  # `traced_step` compares them with the lowered step
    assert set(ModelFact) - set(looked_at) == of_no_gate


@pytest.mark.parametrize(
    ("gate", "value", "node_class", "lane", "words"),
    [
        ("tma", True, "h200", Lane.CUDA, None),
        ("tma", True, "cpu", Lane.REFERENCE, "needs lane cuda, which has no implementation on node class 'cpu'"),
        ("tma", True, "h200", Lane.REFERENCE, "needs lane cuda; this arm runs lane reference"),
        ("attention", "flash", "h200", Lane.REFERENCE, None),
        ("attention", "flash", "cpu", Lane.REFERENCE, "needs node class h200 or h100 or tpu-v6e"),
    ],
)
def test_gate_names_the_lane_or_node_class_that_a_value_needs(
    gate: str, value: GateValue, node_class: str, lane: Lane, words: str | None
) -> None:
    reason = GATES[gate].supports(NODE_CLASSES[node_class], lane, value)
    assert (reason is None) if words is None else (words in str(reason))


@pytest.mark.parametrize(
    ("gate", "facts", "live"),
    [
        ("psiv_cache", {ScanFact.PSIV_SAVED_BYTES: 8}, True),
        ("psiv_cache", {ScanFact.PSIV_RECOMPUTES: 2}, False),
        ("psiv_cache", {ScanFact.PSIV_RECOMPUTES: 2, ScanFact.PSIV_SAVED_BYTES: 8}, "mixed"),
        ("psiv_cache", {}, None),
        ("compile", {ModelFact.COMPILED_GRAPHS: 1}, True),
        ("compile", {ModelFact.COMPILED_GRAPHS: 0, ModelFact.LOSS: "dense"}, False),
        ("compile", {}, None),
    ],
)
def test_gate_attests_the_live_value_from_facts(gate: str, facts: dict[str, Any], live: Any) -> None:
    assert GATES[gate].attest(facts) is live or GATES[gate].attest(facts) == live == "mixed"


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
        of_peer = None if name == "warp_specialize" else "lane = peer"
        assert GATES[name].unused_because({**values, "lane": "peer"}) == of_peer
    sequential = {**values, "lane": "cuda", "schedule": "sequential"}
    assert GATES["superchunk"].unused_because(sequential) == "schedule = sequential"
    assert GATES["chunk_size"].unused_because(sequential) is None


def test_heads_in_turn_need_the_lifted_walk_unless_they_go_one_by_one() -> None:
    gate = GATES["heads_in_turn"]
    assert gate.needs(4) == {"psiv_cache": False, "aggressive_smem_merge": False}
    assert gate.needs(0) == gate.needs(1) == {}


def test_catalogue_lists_where_each_value_runs() -> None:
    public = {gate.name: gate for gate in public_gates()}
    assert set(public) == set(GATES)
    with_cuda = tuple(name for name, entry in NODE_CLASSES.items() if Lane.CUDA in entry.lanes)
    assert public["tma"].node_classes == {"false": with_cuda, "true": with_cuda}
    assert public["schedule"].node_classes["sequential"] == tuple(n for n, e in NODE_CLASSES.items() if e.lanes)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_recipe_values_are_gate_values(recipe: Any) -> None:
    assert all(gate.allows(gate.read(recipe.config)) for gate in GATES.values())


@pytest.mark.parametrize("gate", GATES.values(), ids=lambda gate: gate.name)
def test_facts_in_which_ranks_differ_prove_no_value(gate: Gate) -> None:
    names = [*ModelFact, *ScanFact]
    assert gate.attest(dict.fromkeys(names, "mixed")) not in gate.values
    for name in names:
        gate.attest({name: "mixed"})
