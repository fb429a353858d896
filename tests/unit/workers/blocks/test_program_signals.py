"""Who answers for a program that a signal ended: the program, unless the kernel needed memory or the node is broken."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ablate.experiments.digest import canonical_json
from ablate.experiments.documents import write_whole
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.plan_file import make_plan_file
from ablate.experiments.records.program_report import EvaluationReport
from ablate.workers.blocks import receipt
from ablate.workers.blocks.receipt import TrialRecord
from ablate.workers.errors import BlockBroken
from ablate.workers.node import find_node
from ablate.workers.paths import WorkPaths
from ablate.workers.processes.runner import Ending
from ablate.workers.trials.result import TrialResult
from tests.program_receipts import plan_of, program_receipt, program_values


def ended(
    folder: Path,
    *,
    program_code: int | None,
    evaluation_code: int | None = None,
    exit_code: int = 0,
    node_problem: str | None = None,
    oom_kills: int = 0,
) -> FailureClass | None:
    """Return the class of a trial whose program, if it left a result, ended with this code."""
    _spec, plan = plan_of()
    file = make_plan_file(plan, spec_text=canonical_json(program_values()), content_type="application/json")
    block = file.claimed(0, attempt_id="att_1", attempt_no=1)
    trial = block.trials[0]
    paths = WorkPaths(home=folder).trial("att_1", trial.trial_id)
    if program_code is not None:
        made = program_receipt(plan, plan.blocks[0], trial.arm, reported={"val_bpb": 1.5})
        assert made.program is not None
        evaluation = None
        if evaluation_code is not None:
            evaluation = EvaluationReport(argv=("a",), code="sha256:a", metrics=(), exit_code=evaluation_code)
        program = made.program.model_copy(update={"exit_code": program_code, "evaluation": evaluation})
        result = TrialResult.partial(program=program, failure_class=FailureClass.USER_ERROR, message="it ended")
        write_whole(paths.result, result.model_dump_json())
    record = TrialRecord(
        block=block,
        trial=trial,
        node=find_node("here", "cpu"),
        node_id="nod_1",
        paths=paths,
        ending=Ending(
            wall_s=3.0, stopped=None, exit_code=exit_code, oom_kills=oom_kills, peak_rss_bytes=None, survivors=()
        ),
        node_problem=node_problem,
        started_at=datetime.now(UTC) - timedelta(seconds=3),
        load_average=0.1,
        device_events=(None,),
        foreign_busiest=(),
    )
    try:
        return record.receipt().failure_class
    except BlockBroken as broken:
        return broken.failure_class


@pytest.mark.parametrize("program_code", [-9, -15, -11, -7, 1])
def test_a_signal_of_a_program_counts_for_the_node_only_if_its_probe_fails(tmp_path: Path, program_code: int) -> None:
    assert ended(tmp_path, program_code=program_code) is FailureClass.USER_ERROR
    broken = ended(tmp_path, program_code=program_code, node_problem="device 0 is lost")
    assert broken is (FailureClass.INFRA_NODE if program_code < 0 else FailureClass.USER_ERROR)


@pytest.mark.parametrize("evaluation_code", [-9, -11, 1, 0])
def test_a_signal_of_an_evaluation_counts_for_the_node_as_one_of_the_program(
    tmp_path: Path, evaluation_code: int
) -> None:
    own = {"program_code": 0, "evaluation_code": evaluation_code}
    assert ended(tmp_path, **own) is FailureClass.USER_ERROR
    broken = ended(tmp_path, node_problem="device 0 is lost", **own)
    assert broken is (FailureClass.INFRA_NODE if evaluation_code < 0 else FailureClass.USER_ERROR)


@pytest.mark.parametrize("runs", [True, False])
def test_a_trial_that_was_stopped_in_its_evaluation_says_so(tmp_path: Path, runs: bool) -> None:
    own = {"workload__code": "/srv/lab", "workload__evaluate": ["python", "judge.py"]}
    _spec, plan = plan_of(**own)
    text = canonical_json(program_values(**own))
    file = make_plan_file(plan, spec_text=text, content_type="application/json")
    trial = file.claimed(0, attempt_id="att_1", attempt_no=1).trials[0]
    paths = WorkPaths(home=tmp_path).trial("att_1", trial.trial_id)
    if runs:
        paths.make_empty(paths.evaluation)
    words = "no marked step"
    assert receipt.how_far(paths, trial) == words + (", in the protected evaluation `python judge.py`" * runs)


@pytest.mark.parametrize(
    ("exit_code", "oom_kills", "reachable", "expected"),
    [
        (-9, 0, True, FailureClass.USER_ERROR),
        (-15, 0, True, FailureClass.USER_ERROR),
        (-9, 1, True, FailureClass.OOM),
        (-9, 0, False, FailureClass.INFRA_NODE),
    ],
)
def test_a_signal_to_the_process_of_the_trial_counts_for_the_node_where_no_program_can_send_it(
    tmp_path: Path,
    exit_code: int,
    oom_kills: int,
    reachable: bool,
    expected: FailureClass,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receipt, "keeps_signals_in", lambda: not reachable)
    assert ended(tmp_path, program_code=None, exit_code=exit_code, oom_kills=oom_kills) is expected
