"""A real worker process and real training against a stand-in service."""

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from ablate.experiments.design.arms import arm_digest
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records import receipt_check
from ablate.experiments.records.identity import ClaimedTrial
from ablate.experiments.system.processes import children_of
from ablate.model.config import AttentionConfig, DataConfig, HybridConfig, MeshConfig, OptimConfig, StepsConfig
from tests.integration.worker_service import Rig, block, corpus, rig_in
from tests.waiting import until

_ENDLESS = StepsConfig(warmup=1, timed=1_000_000, val_rows=0)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig_in(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(rig: Rig) -> None:
    rig.fresh()


def test_block_of_two_arms_is_reported_whole(rig: Rig) -> None:
    rig.service.blocks.append(block([rig.config(), rig.config()], attempt="good"))
    (report,) = until(lambda: rig.service.bodies(":report"))
    assert report["failure_class"] is None, report["message"]
    first, second = report["receipts"]
    for receipt in (first, second):
        assert receipt_check.verify(receipt) == []
        assert receipt["outcome"] == "measured"
        assert len(receipt["steps"]) == 14
        assert receipt["ids"]["node"] == "nod_1"
        assert receipt["wall_s"] > receipt["training_s"] > 0
    assert first["summary"]["loss_step1"] == second["summary"]["loss_step1"]
    log = rig.service.log_of("trl_good_0")
    assert log == (rig.home / "work" / "att_good" / "trl_good_0" / "log.txt").read_text()
    assert "step    4 timed" in log
    assert (rig.home / "work" / "att_good" / "trl_good_1" / "receipt.json").is_file()


def test_failing_arms_get_receipts_and_the_block_counts(rig: Rig) -> None:
    diverging = rig.config(optim=OptimConfig(learning_rate=1.0, grad_clip=1e6, warmup_steps=0))
    impossible = rig.config(steps=StepsConfig(warmup=0, timed=1, val_rows=60_000))
    claimed = block([rig.config(), impossible, diverging, rig.config()], attempt="fail")
    dead = claimed.trials[3].model_copy(update={"gates": {**claimed.trials[3].gates, "loss": "chunked"}})
    rig.service.blocks.append(claimed.model_copy(update={"trials": (*claimed.trials[:3], dead)}))
    (report,) = until(lambda: rig.service.bodies(":report"))
    good, bad, _diverged, refused = report["receipts"]
    assert good["outcome"] == "measured"
    assert (bad["outcome"], bad["failure_class"]) == ("failed", "user_error")
    assert "val_rows" in bad["message"]
    assert receipt_check.verify(bad) == []
    assert (refused["outcome"], refused["failure_class"]) == ("refused", "gate_refused")
    assert "gate 'loss' was requested as 'chunked', observed 'dense'" in refused["message"]


def test_each_block_trains_on_the_corpus_as_it_is_then(rig: Rig) -> None:
    folder = corpus(rig.home / "changing")
    config = rig.config(data=DataConfig(corpus=str(folder), seq_len=32))
    reports = [_report_on(rig, config, "old")]
    times = {path: path.stat() for path in folder.iterdir()}
    for path, before in times.items():
        path.write_text(path.read_text().replace("int f", "f int"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    reports.append(_report_on(rig, config, "new"))
    old, new = (receipt for report in reports for receipt in report["receipts"])
    assert old["digests"]["data"] != new["digests"]["data"]
    assert old["summary"]["loss_step1"] != new["summary"]["loss_step1"]
    folder.rename(rig.home / "away")
    gone = _report_on(rig, config, "gone")
    assert (gone["failure_class"], gone["arm"], gone["receipts"]) == ("user_error", None, [])
    assert f"{folder} is not a folder that can be read (No such file or directory)" in gone["message"]


def _report_on(rig: Rig, config: dict[str, Any], attempt: str) -> dict[str, Any]:
    """Run a block of one arm; return its report."""
    number = len(rig.service.bodies(":report"))
    rig.service.blocks.append(block([config], attempt=attempt))
    return until(lambda: rig.service.bodies(":report")[number:])[0]


def test_timeout_breaks_the_block(rig: Rig) -> None:
    rig.service.blocks.append(block([rig.config(steps=_ENDLESS)], attempt="late", timeout_s=2.0))
    (report,) = until(lambda: rig.service.bodies(":report"))
    assert (report["failure_class"], report["arm"], report["receipts"]) == ("timeout", "arm-0", [])
    assert "arm 'arm-0': the trial took longer than 2 s" in report["message"]
    assert rig.trainers() == []


def test_repeated_timeout_is_the_arms_result_and_the_others_are_measured(rig: Rig) -> None:
    claimed = block([rig.config(), rig.config(steps=_ENDLESS), rig.config()], attempt="again", timeout_s=60.0)
    late = {"timeout_s": 4.0, "final_failures": (*claimed.trials[1].final_failures, FailureClass.TIMEOUT)}
    trials = (claimed.trials[0], claimed.trials[1].model_copy(update=late), claimed.trials[2])
    rig.service.blocks.append(claimed.model_copy(update={"trials": trials}))
    (report,) = until(lambda: rig.service.bodies(":report"))
    assert report["failure_class"] is None, report["message"]
    assert [receipt["outcome"] for receipt in report["receipts"]] == ["measured", "timeout", "measured"]
    late_receipt = report["receipts"][1]
    assert (late_receipt["failure_class"], late_receipt["summary"]) == ("timeout", None)
    assert re.fullmatch(r"the trial took longer than 4 s, after [\d,]+ of [\d,]+ steps", late_receipt["message"])
    assert 4.0 <= late_receipt["wall_s"] < 30.0
    assert receipt_check.verify(late_receipt) == []
    assert rig.trainers() == []


def test_repeated_death_without_a_result_is_the_arms_result(rig: Rig) -> None:
    claimed = block([rig.config(steps=_ENDLESS), rig.config()], attempt="dies")
    dies = {"final_failures": (*claimed.trials[0].final_failures, FailureClass.NO_RECEIPT)}
    trials = (claimed.trials[0].model_copy(update=dies), claimed.trials[1])
    rig.service.blocks.append(claimed.model_copy(update={"trials": trials}))
    until(rig.service.steps_done)
    (trainer,) = rig.trainers()
    os.kill(trainer, signal.SIGSEGV)
    (report,) = until(lambda: rig.service.bodies(":report"))
    assert [receipt["outcome"] for receipt in report["receipts"]] == ["failed", "measured"]
    assert report["receipts"][0]["failure_class"] == "no_receipt"
    assert "SIGSEGV" in report["receipts"][0]["message"]
    assert [receipt_check.verify(receipt) for receipt in report["receipts"]] == [[], []]


@pytest.mark.parametrize(("devices", "ranks"), [(1, 0), (2, 2)])
def test_cancel_kills_and_releases(rig: Rig, devices: int, ranks: int) -> None:
    config = rig.config(steps=_ENDLESS, mesh=MeshConfig(devices=devices))
    rig.service.blocks.append(block([config], attempt=f"cancel-{devices}"))
    until(rig.service.steps_done)
    (trainer,) = rig.trainers()
    assert len(children_of(trainer)) == ranks
    rig.service.cancel = True
    (report,) = until(lambda: rig.service.bodies(":report"))
    assert report["failure_class"] == "cancelled"
    assert rig.trainers() == []


@pytest.mark.parametrize("problem", ["stale", "away"])
def test_a_lost_lease_ends_the_trial_silently(rig: Rig, problem: str) -> None:
    rig.service.lease_s = 60.0 if problem == "stale" else 2.0
    claimed = block([rig.config(steps=_ENDLESS)], attempt=problem, lease_s=rig.service.lease_s)
    rig.service.blocks.append(claimed)
    until(rig.service.steps_done)  # an earlier process may be the one that prepares the dataset
    setattr(rig.service, problem, True)
    until(lambda: not rig.trainers())
    claims = len(rig.service.bodies(":claim"))
    until(lambda: len(rig.service.bodies(":claim")) > claims)
    assert rig.service.bodies(":report") == []


def test_a_block_of_ranks_ends_with_the_rank_that_was_killed_and_is_measured_whole_otherwise(rig: Rig) -> None:
    steps, mesh = StepsConfig(warmup=1, timed=20, val_rows=2), MeshConfig(devices=2)
    arms = [rig.config(steps=steps), rig.config(steps=steps, mesh=mesh)]
    rig.service.blocks.append(block(arms, attempt="ranks"))
    (report,) = until(lambda: rig.service.bodies(":report"))
    assert [receipt["outcome"] for receipt in report["receipts"]] == ["measured"] * 2
    assert [receipt_check.verify(receipt) for receipt in report["receipts"]] == [[], []]
    alone, shared = report["receipts"]
    assert shared["summary"]["loss_final"] == pytest.approx(alone["summary"]["loss_final"], abs=1e-5)
    assert shared["facts"]["mesh.sharding"] == "fsdp"
    assert shared["communication_bytes"] > 0
    rig.service.blocks.append(block([rig.config(steps=_ENDLESS, mesh=mesh)], attempt="rank-shot"))
    until(lambda: "step    1" in rig.service.log_of("trl_rank-shot_0"))
    (trainer,) = rig.trainers()
    os.kill(children_of(trainer)[-1], signal.SIGKILL)
    (_, report) = until(lambda: bodies if len(bodies := rig.service.bodies(":report")) > 1 else None)
    assert (report["failure_class"], report["receipts"]) == ("infra_node", [])
    assert "another process killed the trial (SIGKILL)" in report["message"]
    assert rig.trainers() == []


def test_killed_trainer_is_no_measurement(rig: Rig) -> None:
    rig.service.blocks.append(block([rig.config(steps=_ENDLESS)], attempt="shot"))
    until(rig.service.steps_done)
    (trainer,) = rig.trainers()
    os.kill(trainer, signal.SIGKILL)
    (report,) = until(lambda: rig.service.bodies(":report"))
    assert (report["failure_class"], report["arm"], report["receipts"]) == ("infra_node", "arm-0", [])
    assert "another process killed the trial (SIGKILL)" in report["message"]


def test_lost_fork_server_is_replaced(rig: Rig) -> None:
    (server,) = rig.servers()
    os.kill(server, signal.SIGKILL)
    rig.service.blocks.append(block([rig.config()], attempt="fork"))
    (report,) = until(lambda: rig.service.bodies(":report"))
    assert report["receipts"][0]["outcome"] == "measured"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_where_compile_time_decides_every_trial_compiles_from_nothing(rig: Rig) -> None:
    """The same configuration on one node again and again: without empty caches it finds the code of the first trial."""
    small = HybridConfig(vocab_size=512, d_model=32, pattern="F", attention=AttentionConfig(num_heads=2))
    claimed = block([rig.config(compile=True, model=small)] * 2, attempt="cold", timeout_s=300.0)
    trials = tuple(_compiled(trial) for trial in claimed.trials)
    for attempt, cold, asked in (("warm", False, trials), ("cold", True, trials[:1])):
        changes = {"attempt_id": f"att_{attempt}", "cold_caches": cold, "timed": False, "trials": asked}
        rig.service.blocks.append(claimed.model_copy(update=changes))
        report = until(lambda attempt=attempt: _report_of(rig, attempt))
        assert report["failure_class"] is None, report["message"]
        assert [receipt["outcome"] for receipt in report["receipts"]] == ["measured"] * len(asked)
        assert all(receipt["compile_s"] > 0 for receipt in report["receipts"])
        assert report["receipts"][-1]["compile_cache_hit"] is (not cold)
        folders = [rig.home / "work" / f"att_{attempt}" / trial.trial_id / "caches" for trial in asked]
        assert not any(folder.exists() for folder in folders)


def _compiled(trial: ClaimedTrial) -> ClaimedTrial:
    gates = {**trial.gates, "compile": True}
    return trial.model_copy(update={"gates": gates, "arm_digest": arm_digest(gates, trial.config)})


def _report_of(rig: Rig, attempt: str) -> dict[str, Any] | None:
    reports = [body for body in rig.service.bodies(":report") if f"att_{attempt}" in str(body) or body["failure_class"]]
    return reports[-1] if reports else None


def test_a_stored_report_whose_lease_is_lost_is_dropped_and_work_goes_on(rig: Rig) -> None:
    rig.service.blocks.append(block([rig.config()], attempt="lost"))
    rig.service.reports_refused = 10**9
    spool = rig.home / "spool" / "tester"
    until((spool / "att_lost.json").exists)  # the report of the test before may still be there
    rig.service.stale, rig.service.reports_refused = True, 0
    until(lambda: "no longer counts" in (rig.home / "worker.log").read_text())
    until(lambda: not list(spool.glob("*")))
    rig.service.stale = False
    rig.service.blocks.append(block([rig.config()], attempt="after"))
    until(lambda: any(path.endswith("att_after:report") for path, _body, _at in list(rig.service.calls)))


def test_a_node_that_the_service_forgot_registers_again(rig: Rig) -> None:
    rig.service.forgotten = True
    until(lambda: any(path.startswith("/v1/nodes/") for path, _body, _at in list(rig.service.calls)))
    rig.service.blocks.append(block([rig.config()], attempt="anew"))
    (report,) = until(lambda: rig.service.bodies(":report"))
    assert report["receipts"][0]["ids"]["node"] == "nod_2"
    assert rig.service.bodies(":claim")[-1]["node_id"] == "nod_2"
