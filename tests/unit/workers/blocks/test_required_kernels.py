"""A trial whose profiled step lacks the required kernel is refused, with the pattern and the nearest names."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ablate.experiments.design.plan import Plan
from ablate.experiments.digest import canonical_json
from ablate.experiments.documents import write_whole
from ablate.experiments.outcomes import FailureClass, Outcome
from ablate.experiments.records.plan_file import make_plan_file
from ablate.experiments.records.program_report import unmet_requirement
from ablate.experiments.records.receipt_check import contradictions, verify
from ablate.experiments.records.receipts import Receipt
from ablate.workers.blocks.receipt import TrialRecord
from ablate.workers.node import find_node
from ablate.workers.paths import WorkPaths
from ablate.workers.processes.runner import Ending
from ablate.workers.trials.result import TrialResult
from tests.program_receipts import plan_of, program_receipt, program_values

CHANGES = {"workload__require_kernels": {"fused": "liger_.*entropy"}}
KERNELS = [("ampere_sgemm_128", 3, 70.0), ("liger_rms_norm", 1, 5.0), ("cross_entropy", 1, 9.0)]


def ran(plan: Plan, arm: str, kernels: Sequence[tuple[str, int, float]], folder: Path) -> Receipt:
    """Return the receipt that a worker makes of a trial of `arm` in the first block with this table of kernels."""
    text = canonical_json(program_values(**CHANGES))
    file = make_plan_file(plan, spec_text=text, content_type="application/json")
    block = file.claimed(0, attempt_id="att_1", attempt_no=1)
    trial = next(one for one in block.trials if one.arm == arm)
    made = program_receipt(plan, plan.blocks[0], arm, reported={"val_bpb": 1.5}, kernels=kernels)
    paths, node = WorkPaths(home=folder).trial("att_1", trial.trial_id), find_node("here", "cpu")
    result = TrialResult.partial(
        program=made.program,
        program_steps=made.steps,
        training_began_s=made.training_began_s,
        training_s=made.training_s,
        peak_allocated_bytes=1,
        peak_reserved_bytes=1,
        foreign_load=0.01,
        process_s=2.0,
    )
    write_whole(paths.result, result.model_dump_json())
    return TrialRecord(
        block=block,
        trial=trial,
        node=node,
        node_id="nod_1",
        paths=paths,
        ending=Ending(wall_s=3.0, stopped=None, exit_code=0, oom_kills=0, peak_rss_bytes=None, survivors=()),
        started_at=datetime.now(UTC) - timedelta(seconds=3),
        load_average=0.1,
        device_events=(None,),
        foreign_busiest=(),
    ).receipt()


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        (KERNELS, "none of its 3 is, the nearest are 'cross_entropy', 'liger_rms_norm'"),
        ((), "there is no table of kernels: the program marks no steps, or does not use torch"),
        ([("x" * 300, 1, 1.0)], "the nearest are 'xxxxxxxx"),
    ],
)
def test_an_arm_without_its_kernel_is_refused(
    kernels: Sequence[tuple[str, int, float]], words: str, tmp_path: Path
) -> None:
    _, plan = plan_of(**CHANGES)
    receipt = ran(plan, "fused", kernels, tmp_path)
    assert (receipt.outcome, receipt.failure_class) == (Outcome.REFUSED, FailureClass.GATE_REFUSED)
    assert "require_kernels asks for a kernel that matches 'liger_.*entropy'" in str(receipt.message)
    assert words in str(receipt.message)
    assert len(str(receipt.message)) < 500
    assert verify(receipt.model_dump(mode="json")) == []


@pytest.mark.parametrize(
    ("calls", "kernels", "words"),
    [
        ({"sgemm": 3, "liger": 1}, KERNELS, None),
        ({"sgemm": 0}, KERNELS, "it has 3, such as of 'ampere_sgemm_128'"),
        ({"sgemm": 4}, KERNELS, "asks for 4 calls of kernels like 'sgemm' in the profiled step; it has 3"),
        ({"flash": 28}, KERNELS, "28 calls of kernels like 'flash' in the profiled step; none of its 3 is"),
        ({"flash": 0}, KERNELS, None),
        ({"flash": 0}, (), "there is no table of kernels"),
        ({"others": 0}, KERNELS, None),
        ({"flash": 0}, [*KERNELS, ("(all others)", 2, 1.0)], "has only the 3 longest kernels, and others may match"),
    ],
)
def test_calls_of_kernels_are_counted(
    calls: dict[str, int], kernels: Sequence[tuple[str, int, float]], words: str | None
) -> None:
    _, plan = plan_of(workload__require_kernels={"fused": calls})
    receipt = program_receipt(plan, plan.blocks[0], "fused", reported={"val_bpb": 1.5}, kernels=kernels)
    found = " ".join(contradictions(receipt))
    assert found == "" if words is None else words in found


def test_drawn_tables_are_judged_as_the_standard_library_counts_them() -> None:
    rng, refused = random.Random(3), 0  # noqa: S311  # draws tables
    _, plan = plan_of(workload__require_kernels={"fused": "a"})
    made = program_receipt(plan, plan.blocks[0], "fused", reported={"val_bpb": 1.5}, kernels=KERNELS)
    for _ in range(300):
        rows = [("".join(rng.choices("ab", k=3)), rng.randint(0, 3), 1.0) for _ in range(rng.randint(1, 6))]
        calls = {"".join(rng.choices("ab", k=rng.randint(1, 2))): rng.choice([None, 0, 1, 4]) for _ in range(2)}
        counts = {name: sum(number for row, number, _us in rows if re.search(name, row)) for name in calls}
        met = all(counts[name] == number if number is not None else counts[name] for name, number in calls.items())
        report = made.program.model_copy(update={"kernels": tuple(rows)})
        assert (unmet_requirement(report, replace(made.config, required_kernels=calls)) is None) == met
        refused += not met
    assert 50 < refused < 280


def test_other_arms_and_arms_with_their_kernel_are_measured(tmp_path: Path) -> None:
    _, plan = plan_of(**CHANGES)
    assert ran(plan, "baseline", KERNELS, tmp_path / "base").outcome is Outcome.MEASURED
    own = ran(plan, "fused", [*KERNELS, ("liger_cross_entropy", 1, 2.0)], tmp_path / "own")
    assert (own.outcome, own.message) == (Outcome.MEASURED, None)
    assert verify(own.model_dump(mode="json")) == []


def test_a_receipt_that_measured_without_the_kernel_contradicts_itself() -> None:
    _, plan = plan_of(**CHANGES)
    forged = program_receipt(plan, plan.blocks[0], "fused", reported={"val_bpb": 1.5}, kernels=KERNELS)
    assert any("liger_.*entropy" in problem for problem in contradictions(forged))
