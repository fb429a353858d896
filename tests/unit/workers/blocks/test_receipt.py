"""What a worker makes of a trial that measured and breaks a guard: the block runs again, at most twice."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.outcomes import FailureClass, Outcome
from ablate.experiments.records.identity import ClaimedBlock
from ablate.experiments.records.receipt_check import verify
from ablate.experiments.retries import Break
from ablate.model.measurements import Step
from ablate.workers.errors import BlockBroken
from ablate.workers.lease import StopReason
from ablate.workers.node import Node, find_node
from tests.bundles import make_file
from tests.factories import make_steps, make_validations
from tests.trial_files import left_behind


@pytest.fixture(scope="module")
def node() -> Node:
    return find_node("here", "cpu")


def claimed(broken: int = 0, failure: FailureClass = FailureClass.INVALID_MEASUREMENT, **changes: Any) -> ClaimedBlock:
    file = make_file(placement={"node_class": "cpu", "max_foreign_load": "20%"}, **changes)
    before = [Break(0, failure, "baseline")] * broken
    return file.claimed(0, attempt_id="att_1", attempt_no=broken + 1, broken=before)


def steps_of(block: ClaimedBlock) -> tuple[Step, ...]:
    return make_steps(block.trials[0].config, tokens_per_s=5000.0, loss_step1=8.0, seed=1)


def compiled_late(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    return (*steps[:-1], steps[-1].model_copy(update={"compilations": 1}))


def faster(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    return tuple(step.model_copy(update={"seconds": step.seconds * 0.97}) for step in steps)


def test_a_trial_that_breaks_no_guard_is_measured(node: Node, tmp_path: Path) -> None:
    receipt = left_behind(claimed(), node, tmp_path).receipt()
    assert receipt.outcome is Outcome.MEASURED
    assert verify(receipt.model_dump(mode="json")) == []


@pytest.mark.parametrize("loss", [7.9, math.nan, math.inf])
def test_validations_of_a_schedule_are_kept_unless_one_is_no_number(loss: float, node: Node, tmp_path: Path) -> None:
    block = claimed(
        workload__steps={"warmup": 1, "warmup_s": 0, "timed": 4, "val_rows": 2, "val_every": 2},
    )
    steps = steps_of(block)
    validations = make_validations(block.trials[0].config, steps, [loss, 7.5])
    receipt = left_behind(block, node, tmp_path, steps=steps, validations=validations).receipt()
    if math.isfinite(loss):
        assert receipt.summary is not None
        assert receipt.summary.curve is not None
        assert [point.loss for point in receipt.summary.curve] == [7.9, 7.5]
        assert receipt.outcome is Outcome.MEASURED
    else:
        assert (receipt.failure_class, receipt.validations) == (FailureClass.NUMERICS, None)
        assert receipt.message == "a validation loss is not finite"
    assert verify(receipt.model_dump(mode="json")) == []


def test_a_trial_that_leaves_out_its_schedule_breaks_the_block(node: Node, tmp_path: Path) -> None:
    block = claimed(workload__steps={"warmup": 1, "warmup_s": 0, "timed": 4, "val_rows": 2, "val_every": 2})
    with pytest.raises(BlockBroken, match="val_every = 2 gives 2 of them"):
        left_behind(block, node, tmp_path, validations=None).receipt()


SPOILED: dict[str, tuple[Any, str]] = {
    "load that is not told": (lambda _: {"foreign_load": None}, "did not report foreign_load"),
    "compilation": (lambda block: {"steps": compiled_late(steps_of(block))}, "compiled inside the window"),
    "missing steps": (lambda block: {"steps": steps_of(block)[:-1]}, "the configuration gives"),
    "clock": (lambda block: {"steps": faster(steps_of(block))}, "the clock gives it"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_guard_hit_reruns_the_block_twice_and_then_makes_the_trial_invalid(
    what: str, node: Node, tmp_path: Path
) -> None:
    changes, message = SPOILED[what]
    for broken in range(2):
        block = claimed(broken)
        with pytest.raises(BlockBroken) as caught:
            left_behind(block, node, tmp_path / str(broken), **changes(block)).receipt()
        assert (caught.value.failure_class, caught.value.arm) == ("invalid_measurement", block.trials[0].arm)
        assert message in caught.value.message
    block = claimed(2)
    receipt = left_behind(block, node, tmp_path / "last", **changes(block)).receipt()
    assert (receipt.outcome, receipt.failure_class) == (Outcome.INVALID, FailureClass.INVALID_MEASUREMENT)
    assert message in str(receipt.message)
    assert receipt.steps


def test_others_load_breaks_a_block_once_and_then_it_counts(node: Node, tmp_path: Path) -> None:
    for broken in (0, 2):
        with pytest.raises(BlockBroken, match="others took 50% of the cores' time") as caught:
            left_behind(claimed(broken), node, tmp_path / str(broken), foreign_load=0.5).receipt()
        assert (caught.value.failure_class, caught.value.arm) == ("disturbed", claimed().trials[0].arm)
    receipt = left_behind(claimed(1, FailureClass.DISTURBED), node, tmp_path / "last", foreign_load=0.5).receipt()
    assert (receipt.outcome, receipt.environment.foreign_load) == (Outcome.MEASURED, 0.5)


EXACT = {"primary": {"metric": "peak_allocated_gib", "margin": "0.5%"}}


def test_what_disturbs_nothing_but_times_breaks_no_block_of_an_exact_metric(node: Node, tmp_path: Path) -> None:
    block = claimed(verdict=EXACT)
    assert not block.timed
    for name, changes in {"load": {"foreign_load": 0.5}, "compiled": {"steps": compiled_late(steps_of(block))}}.items():
        receipt = left_behind(block, node, tmp_path / name, **changes).receipt()
        assert receipt.outcome is Outcome.MEASURED


@pytest.mark.parametrize("done", [0, 3])
def test_a_stopped_trial_says_how_far_it_came(done: int, node: Node, tmp_path: Path) -> None:
    block = claimed(2)
    final = {"final_failures": (*block.trials[0].final_failures, FailureClass.TIMEOUT)}
    block = block.model_copy(update={"trials": (block.trials[0].model_copy(update=final), *block.trials[1:])})
    record = left_behind(block, node, tmp_path)
    record.paths.steps.write_text("".join(f"{step.model_dump_json()}\n" for step in steps_of(block)[:done]))
    record = replace(record, ending=replace(record.ending, stopped=StopReason.TIMEOUT))
    total = len(steps_of(block))
    assert str(record.receipt().message).endswith(f" s, after {done} of {total} steps")


def test_a_trial_whose_files_used_too_much_space_is_a_result_of_its_arm(node: Node, tmp_path: Path) -> None:
    block = claimed(2)
    record = left_behind(block, node, tmp_path)
    record = replace(record, ending=replace(record.ending, stopped=StopReason.OUTPUT_LIMIT))
    receipt = record.receipt()
    assert (receipt.outcome, receipt.failure_class) == (Outcome.FAILED, FailureClass.OUTPUT_LIMIT)
    assert "files use more space than a trial may use, after" in str(receipt.message)


def test_a_trial_with_too_many_processes_is_its_users_error(node: Node, tmp_path: Path) -> None:
    record = left_behind(claimed(2), node, tmp_path)
    ending = replace(
        record.ending, stopped=StopReason.PROCESS_LIMIT, excess="9 processes at once; allowed: 8 (raise it)"
    )
    receipt = replace(record, ending=ending).receipt()
    assert (receipt.outcome, receipt.failure_class) == (Outcome.FAILED, FailureClass.USER_ERROR)
    assert "the trial had 9 processes at once; allowed: 8 (raise it), after" in str(receipt.message)
    assert receipt.environment.versions["isolation"] in {"landlock", "none"}
