from dataclasses import replace

import pytest

from ablate.experiments.records.circumstances import NOT_REGISTERED
from ablate.kernels.backends import NODE_CLASSES
from ablate.workers.errors import ExecRefused
from ablate.workers.node import Node, find_node
from ablate.workers.offline.cli import parse_numbers, refusals, remarks
from tests.bundles import make_file, registered
from tests.factories import command_values


@pytest.fixture(scope="module")
def node() -> Node:
    return replace(find_node("here", "cpu"), lacks=())


def test_refusals_node_that_fits_has_none(node: Node) -> None:
    file = make_file()
    assert list(refusals(file, node)) == []
    assert list(remarks(registered(file), node)) == []
    (remark,) = remarks(file, node)
    assert remark.startswith(NOT_REGISTERED)


def test_refusals_other_node_class_and_too_few_devices(node: Node) -> None:
    bare = replace(node, devices=replace(node.devices, node_class=NODE_CLASSES["h200"], devices=()))
    reasons = list(refusals(make_file(), bare))
    assert reasons[0] == "this node is of class 'h200'; the plan asks for 'cpu'"
    assert reasons[1] == "this node has 0 devices; the plan asks for 1"


@pytest.mark.parametrize(
    ("name", "there", "asked", "fits"),
    [
        ("h100", 2, 2, True),
        ("h100", 4, 2, True),
        ("h100", 1, 2, False),
        ("tpu-v6e", 4, 4, True),
        ("tpu-v6e", 8, 4, False),
        ("xla-cpu", 1, 8, True),
        ("tpu-v6e-compile", 1, 16, True),
        ("tpu-v6e", 0, 1, False),
    ],
)
def test_refusals_count_real_devices_and_leave_virtual_ones(
    node: Node, name: str, there: int, asked: int, fits: bool
) -> None:
    file = make_file()
    file = file.model_copy(update={"plan": file.plan.model_copy(update={"node_class": name, "devices": asked})})
    devices = tuple(node.devices.first.model_copy(update={"index": index}) for index in range(there))
    other = replace(node, devices=replace(node.devices, node_class=NODE_CLASSES[name], devices=devices))
    problem = f"this node has {there} devices; the plan asks for {asked}"
    assert (problem not in list(refusals(file, other))) == fits


def test_refusals_plan_of_other_code(node: Node) -> None:
    file = make_file()
    other = file.model_copy(update={"spec_text": file.spec_text.replace('"order_seed": 7', '"order_seed": 8')})
    reasons = list(refusals(other, node))
    assert "digest" in reasons[0]
    assert "plan the spec again with the code of this node" in reasons[-1]


def test_remarks_say_that_the_plan_was_made_by_other_source_files(node: Node) -> None:
    file = registered(make_file().model_copy(update={"code_digest": "sha256:0123456789ab"}))
    (remark,) = remarks(file, node)
    assert "made with other source files" in remark


@pytest.mark.parametrize(
    ("text", "numbers"), [("", (0, 1, 2, 3, 4, 5)), ("1-3", (0, 1, 2)), ("6", (5,)), ("1, 4-5,4", (0, 3, 4))]
)
def test_parse_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_numbers(text, 6) == numbers


@pytest.mark.parametrize("text", ["0", "7", "3-2", "a", "1-", "-1", "1;2", "²"])
def test_parse_numbers_refuses(text: str) -> None:
    with pytest.raises(ExecRefused, match="allowed"):
        parse_numbers(text, 6)


def test_a_node_without_the_secrets_of_a_plan_says_so_before_it_runs_anything(node: Node) -> None:
    command = command_values(workload__secrets=["HF_TOKEN", "WANDB_API_KEY"])
    file = make_file(**{name: command[name] for name in ("workload", "baseline", "variants")})
    [sentence] = refusals(file, node, {"HF_TOKEN": "x"})
    assert sentence == "node 'here' has no secret WANDB_API_KEY (ABLATE_SECRETS); it has: HF_TOKEN"


def test_a_plan_over_several_nodes_is_refused(node: Node) -> None:
    command = command_values(placement__nodes=2)
    file = make_file(**{name: command[name] for name in ("workload", "baseline", "variants", "placement")})
    assert list(refusals(file, node)) == ["the plan runs over 2 nodes, which only a worker of a service does"]
