"""Nodes that share a block: they begin a trial together, and the receipt is about all of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.analysis.noise.calibrate import key_for
from experiments.outcomes import FailureClass, Outcome
from experiments.records.messages import BlockNode, BlockNodes, ClaimedBlock, NodePart
from experiments.records.receipts import Receipt, nodes_of
from experiments.records.surroundings import ForeignProcess, HeldDevice
from tests.bundles import make_file
from tests.trial_files import left_behind
from workers.blocks import together
from workers.blocks.receipt import TrialRecord
from workers.blocks.together import Together
from workers.errors import BlockBroken, BlockStopped, SettingsError
from workers.identity.node import Node, find_node
from workers.lease import Lease, StopReason
from workers.settings import Settings

NODES = BlockNodes(own=0, all=(BlockNode(name="here", meeting="10.0.0.5:1"), BlockNode(name="b", meeting="10.0.0.6:2")))


@pytest.fixture(scope="module")
def node() -> Node:
    return find_node("here", "cpu")


def shared(own: int = 0) -> ClaimedBlock:
    placement = {"node_class": "cpu", "devices": 2, "nodes": 2}
    block = make_file(placement=placement).claimed(0, attempt_id="att_1", attempt_no=1)
    return block.model_copy(update={"nodes": NODES.model_copy(update={"own": own})})


def of(own: int = 0) -> Together:
    block = shared(own)
    assert block.nodes is not None
    return Together(block, block.nodes, interface="eth0")


def other(trial_id: str, **more: object) -> NodePart:
    device = HeldDevice(name="test", node="b")
    return NodePart.model_validate({"trial_id": trial_id, "devices": (device,), **more})


def stops(_seconds: float) -> None:
    raise BlockStopped(StopReason.FENCED)


def answering(parts: Together, *answers: tuple[NodePart, ...]) -> None:
    """Let the service answer the next heartbeats so; later ones fail."""
    left = list(answers)

    def exchange() -> bool:
        if not left:
            return False
        parts.receive(parts.part, left.pop(0))
        return True

    parts.exchange = exchange


def test_a_trial_begins_when_every_node_is_ready_for_it() -> None:
    parts, pauses = of(), list[float]()
    answering(parts, (), (), (other("trl_1"),))
    parts.begin("trl_1", pauses.append)
    assert len(pauses) == 2
    assert parts.part == NodePart(trial_id="trl_1")
    answering(parts, ())
    with pytest.raises(BlockStopped):
        parts.begin("trl_2", stops)  # the other node is still in trl_1


def test_a_block_that_has_to_stop_waits_for_nobody() -> None:
    with pytest.raises(BlockStopped):
        of().begin("trl_1", stops)


def test_the_first_node_waits_for_the_parts_of_all_and_the_others_for_none() -> None:
    first, second = of(0), of(1)
    over = other("trl_1", over=True)
    answering(first, (other("trl_1"),), (over,))
    pauses: list[float] = []
    assert first.end(NodePart(trial_id="trl_1", over=True), pauses.append) == (over,)
    assert len(pauses) == 1
    answering(second, ())
    second.end(NodePart(trial_id="trl_1", over=True), stops)


def test_an_answer_about_an_earlier_trial_says_nothing_about_this_one() -> None:
    parts = of()
    answering(parts, (other("trl_1"),))
    parts.begin("trl_1", stops)
    parts.part, parts.others = NodePart(trial_id="trl_2"), ()
    parts.receive(NodePart(trial_id="trl_1"), (other("trl_1", over=True),))
    assert parts.others == ()


def test_ranks_that_another_node_left_stop_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, lease = of(), Lease(60.0, sent_at=10**12)
    lease.was_left = parts.was_left
    answering(parts, (other("trl_1"),))
    parts.begin("trl_1", stops)
    parts.receive(parts.part, (other("trl_1", over=True),))
    assert lease.reason() is None
    monkeypatch.setattr(together, "PATIENCE_S", 0.0)
    assert lease.reason() is StopReason.LEFT
    answering(parts, (other("trl_1", over=True),))
    parts.end(NodePart(trial_id="trl_1", over=True), stops)
    assert lease.reason() is None, "the trial is over"


def test_ranks_meet_at_the_first_node_under_a_name_of_the_attempt() -> None:
    meeting = of(1).meeting("trl_1")
    assert (meeting.host, meeting.port, meeting.name) == ("10.0.0.5", 1, "att_1/trl_1")
    assert (meeting.number, meeting.nodes, meeting.interface) == (1, 2, "eth0")


def record(node: Node, folder: Path, part: Callable[[str], NodePart], **own: object) -> TrialRecord:
    block = shared()
    return replace(left_behind(block, node, folder, **own), others=(part(block.trials[0].trial_id),))


def test_a_receipt_names_every_device_with_its_node(node: Node, tmp_path: Path) -> None:
    busy = ForeignProcess(pid=1, name="backup", cpu_s=9.0)
    receipt = record(node, tmp_path, lambda trial: other(trial, over=True, foreign_busiest=(busy,))).receipt()
    assert receipt.outcome is Outcome.MEASURED
    assert nodes_of(receipt.environment) == ("here", "b")
    assert receipt.ids.device == "here/0 + b/0"
    assert receipt.environment.foreign_busiest[0].name == "backup on 'b'"
    key = key_for(receipt, recipe="hybrid-tiny", metric="tokens_per_s").device_serial
    assert key == key_for(swapped(receipt), recipe="hybrid-tiny", metric="tokens_per_s").device_serial


def swapped(receipt: Receipt) -> Receipt:
    """Return the receipt of a trial in which the other node had rank 0."""
    where = receipt.environment
    assert where.devices is not None
    change = {"devices": where.devices[::-1], "node_name": "b", "device_name": "test", "device_serial": None}
    return receipt.model_copy(update={"environment": where.model_copy(update=change)})


FAILURES = {
    "only the other": (None, FailureClass.OOM, FailureClass.OOM, "node 'b': theirs"),
    "the other, and its connections closed": (
        FailureClass.INFRA_NODE,
        FailureClass.OOM,
        FailureClass.OOM,
        "node 'b': theirs",
    ),
    "this one, and its connections closed": (FailureClass.OOM, FailureClass.INFRA_NODE, FailureClass.OOM, "ours"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_the_failure_of_a_rank_on_any_node_is_that_of_the_trial(case: str, node: Node, tmp_path: Path) -> None:
    ours, theirs, expected, message = FAILURES[case]
    own = {} if ours is None else {"failure_class": ours, "message": "ours"}
    receipt = record(
        node, tmp_path, lambda trial: other(trial, over=True, failure_class=theirs, message="theirs"), **own
    ).receipt()
    assert (receipt.failure_class, receipt.message) == (expected, message)


def test_a_lost_node_breaks_the_block(node: Node, tmp_path: Path) -> None:
    lost = {"failure_class": FailureClass.INFRA_NODE, "message": "another process killed the trial (SIGKILL)"}
    with pytest.raises(BlockBroken, match="node 'b': another process killed the trial") as broken:
        record(node, tmp_path, lambda trial: other(trial, over=True, **lost)).receipt()
    assert broken.value.failure_class is FailureClass.INFRA_NODE


def test_a_trial_that_others_left_says_so(node: Node, tmp_path: Path) -> None:
    left = left_behind(shared(), node, tmp_path)
    part = replace(left, ending=replace(left.ending, stopped=StopReason.LEFT)).part()
    assert (part.over, part.failure_class) == (True, FailureClass.INFRA_NODE)


@pytest.mark.parametrize("value", ["10.0.0.5", "localhost:29500", "10.0.0.5:0", "10.0.0.5:x", "[::1]:29500"])
def test_a_meeting_is_an_address_and_a_port(value: str) -> None:
    with pytest.raises(ValueError, match="allowed: "):
        Settings(meeting=value)
    assert Settings(meeting="10.0.0.5:29500").meeting == "10.0.0.5:29500"
    assert Settings(meeting="").meeting is None


def test_a_node_meets_others_only_at_an_address_of_its_own() -> None:
    assert find_node("here", "cpu", "127.0.0.1:29500").interface == "lo"
    with pytest.raises(SettingsError, match=r"names 192\.0\.2\.1, which is no address of this machine; it has: .*127"):
        find_node("here", "cpu", "192.0.2.1:29500")
