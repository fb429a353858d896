"""Blocks on a node whose processes are pretended: how data is prepared, and which software may run."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.documents import write_whole
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.identity import ClaimedBlock
from ablate.experiments.records.messages import PREPARATION_LIMIT_S
from ablate.model.config import DataConfig
from ablate.workers.blocks.block_runner import BlockRunner, NodeContext
from ablate.workers.errors import BlockBroken
from ablate.workers.lease import Lease, StopReason
from ablate.workers.node import Node, find_node
from ablate.workers.paths import WorkPaths
from ablate.workers.processes.runner import Ending
from ablate.workers.processes.trial_output import BlockOutput
from ablate.workers.trials.result import TrialOrder, TrialResult
from tests.integration.worker_service import block, built_in_arm
from tests.programs import program_config
from tests.trial_files import left_behind

DONE = Ending(stopped=None, exit_code=0, wall_s=1.0, oom_kills=0, peak_rss_bytes=None, survivors=())


class Processes:
    """Stands in for a TrialRunner: notes orders and limits; preparations end as the test says."""

    def __init__(self, prepared: TrialResult | None, ending: Ending = DONE) -> None:
        self.prepared, self.ending = prepared, ending
        self.limits: list[tuple[bool, float]] = []

    def run(self, order: TrialOrder, _lease: Lease, *, timeout_s: float) -> Ending:
        self.limits.append((order.prepare_only, timeout_s))
        if order.prepare_only and self.prepared is not None:
            order.paths.folder.mkdir(parents=True, exist_ok=True)
            write_whole(order.paths.prepared, self.prepared.model_dump_json())
        return self.ending if order.prepare_only else DONE


@pytest.fixture(scope="module")
def node() -> Node:
    return find_node("here", "cpu")


@pytest.fixture
def runner_of(node: Node, tmp_path: Path) -> Callable[..., BlockRunner]:
    def make(processes: Processes, **changes: Any) -> BlockRunner:
        proof = node.devices.proof()
        context = NodeContext(
            node=replace(node, **changes),
            node_id="nod_1",
            runner=processes,  # type: ignore[arg-type]
            paths=WorkPaths(home=tmp_path),
            data_dir=tmp_path / "data",
            proof=proof,
            secrets=(tmp_path,),
        )
        return BlockRunner(context)

    return make


def claimed(attempt: str) -> ClaimedBlock:
    return block([built_in_arm(Path("/corpus"))] * 2, attempt=attempt, timeout_s=60.0)


def rehearse(runner: BlockRunner, attempt: str = "one") -> list[str]:
    return list(runner.rehearse(claimed(attempt), Lease(60.0, sent_at=10**12), BlockOutput()))


def test_every_block_prepares_its_data_once_with_a_limit_of_its_own(
    runner_of: Callable[..., BlockRunner], tmp_path: Path
) -> None:
    processes = Processes(TrialResult.partial(data_folder=tmp_path))
    runner = runner_of(processes)
    for attempt in ("one", "two"):
        rehearse(runner, attempt)
    assert processes.limits == [(True, PREPARATION_LIMIT_S), (False, 60.0), (False, 60.0)] * 2


def test_all_data_of_a_block_are_prepared_before_its_first_trial(
    node: Node, runner_of: Callable[..., BlockRunner], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = [DataConfig(corpus="/corpus", seq_len=32, documents=borders) for borders in ("separate", "joined")]
    data += [DataConfig(corpus="/corpus", seq_len=64), DataConfig(corpus="/corpus", seq_len=32)]
    own = block([built_in_arm(Path("/corpus"), data=one) for one in data], attempt="one", timeout_s=60.0)
    receipt = left_behind(own, node, tmp_path).receipt()
    processes, seen = Processes(TrialResult.partial(data_folder=tmp_path)), []

    def trial(*_arguments: Any, **_named: Any) -> Any:
        seen.append([*processes.limits])
        return receipt

    monkeypatch.setattr(BlockRunner, "_trial", trial)
    with suppress(BlockBroken):  # four times one receipt
        runner_of(processes).run(own, Lease(60.0, sent_at=10**12), BlockOutput())
    assert seen == [[(True, PREPARATION_LIMIT_S)] * 2] * 4, "one for each length of rows"


STOPPED = replace(DONE, stopped=StopReason.TIMEOUT)
FILLED = replace(DONE, stopped=StopReason.OUTPUT_LIMIT)
CROWDED = replace(DONE, stopped=StopReason.PROCESS_LIMIT, excess="9 processes at once; allowed: 8")
FAILED = TrialResult.partial(failure_class=FailureClass.USER_ERROR, message="DataError: corpus '/corpus'")


@pytest.mark.parametrize(
    ("prepared", "ending", "failure", "message"),
    [
        (None, STOPPED, FailureClass.TIMEOUT, "it took longer than 3600 s; use a smaller corpus or max_corpus_mib"),
        (None, FILLED, FailureClass.OUTPUT_LIMIT, "its process used too much space"),
        (None, CROWDED, FailureClass.USER_ERROR, "it had 9 processes at once; allowed: 8"),
        (FAILED, DONE, FailureClass.USER_ERROR, "DataError: corpus '/corpus'"),
        (None, replace(DONE, exit_code=-9), FailureClass.INFRA_NODE, "ended with exit code -9 without a result"),
    ],
)
def test_no_arm_answers_for_data_that_cannot_be_prepared(
    runner_of: Callable[..., BlockRunner],
    prepared: TrialResult | None,
    ending: Ending,
    failure: FailureClass,
    message: str,
) -> None:
    processes = Processes(prepared, ending)
    with pytest.raises(BlockBroken, match="the data could not be prepared: ") as caught:
        rehearse(runner_of(processes))
    assert (caught.value.failure_class, caught.value.arm) == (failure, None)
    assert message in caught.value.message
    assert processes.limits == [(True, PREPARATION_LIMIT_S)]


def test_a_block_during_which_the_software_changed_does_not_count(
    node: Node, runner_of: Callable[..., BlockRunner], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    receipt = left_behind(claimed("one"), node, tmp_path).receipt()
    monkeypatch.setattr(BlockRunner, "_trial", lambda *_arguments, **_named: receipt)
    runner = runner_of(Processes(None), code=replace(node.code, digest="sha256:earlier"))
    for _ in range(2):
        with pytest.raises(BlockBroken, match="the source code changed after this worker had started") as caught:
            runner.run(claimed("one"), Lease(60.0, sent_at=10**12), BlockOutput())
        assert caught.value.failure_class is FailureClass.INFRA_NODE
    assert "the source code changed" in str(runner.quarantine)
    with pytest.raises(BlockBroken, match="this node must be repaired first: the source code changed"):
        rehearse(runner)


def test_a_block_whose_secret_this_node_lacks_breaks_before_anything_runs(
    runner_of: Callable[..., BlockRunner], node: Node
) -> None:
    processes = Processes(None)
    own = block([built_in_arm(Path("/corpus"))], attempt="one")
    config = program_config(None, secrets=("HF_TOKEN",))
    own = own.model_copy(update={"trials": (own.trials[0].model_copy(update={"config": config}),)})
    with pytest.raises(BlockBroken, match="node 'here' has no secret HF_TOKEN") as broken:
        runner_of(processes).run(own, Lease(60.0, sent_at=10**12), BlockOutput())
    assert broken.value.failure_class is FailureClass.INFRA_NODE
    assert processes.limits == []
