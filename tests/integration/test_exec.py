"""`ablate offline exec` as people start it: real trials, killed, resumed; then import, verdict, report, MLflow."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ablate.experiments.records.bundle import Bundle
from ablate.experiments.records.bundle_files import RECEIPT, read_bundle_files
from ablate.experiments.records.bundle_reader import open_bundle
from ablate.experiments.records.plan_file import PlanFile, plan_file_text
from ablate.experiments.reporting.mlflow.sink import Sink
from ablate.experiments.reporting.view import judge_bundle
from ablate.experiments.system.setting_values import without_credentials
from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.lifecycle import OutboxKind
from tests import mlflow_server
from tests.api_stack import running_api
from tests.bundles import archive_of, make_file
from tests.integration.worker_service import corpus, links_into, processes_of
from tests.projectors import projector
from tests.waiting import LIMIT_S, until

ROOT = Path(__file__).resolve().parents[2]
HEAVY = "celery kombu httpx mlflow sqlalchemy scipy tenacity pydantic_settings fastapi jinja2 matplotlib"


@dataclass(frozen=True)
class Run:
    """A plan on disk and the folder of its bundle."""

    folder: Path
    file: PlanFile

    @property
    def bundle(self) -> Path:
        return self.folder / "bundle"

    def command(self, *options: str) -> list[str]:
        plan = self.folder / "plan.json"
        plan.write_text(plan_file_text(self.file))
        given = [str(plan), "--out", str(self.bundle), "--data-dir", str(self.folder / "data"), *options]
        return [sys.executable, "-m", "ablate.workers.offline", *given]

    def start(self, *options: str) -> "subprocess.Popen[str]":
        mark = {"ABLATE_HOME": str(self.folder), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            self.command(*options),
            cwd=ROOT,
            env={**os.environ, **mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def execute(self, *options: str) -> tuple[int, str, str]:
        process = self.start(*options)
        out, err = process.communicate(timeout=LIMIT_S)
        return process.returncode, out, err

    def read(self) -> Bundle:
        return open_bundle(read_bundle_files(self.bundle))


def tiny(folder: Path, *, timed: int = 12, **steps: int) -> Run:
    """A plan of two arms that trains a step in milliseconds."""
    workload = {
        "recipe": "hybrid-tiny",
        "overrides": {
            "seq_len": 32,
            "d_model": 32,
            "headdim": 16,
            "d_state": 16,
            "num_heads": 2,
            "vocab_size": 512,
            "corpus": str(corpus(folder / "corpus")),
        },
        "steps": {"warmup": 1, "warmup_s": 0, "timed": timed, "val_rows": 2, **steps},
    }
    return Run(folder, make_file(workload=workload, baseline={}, variants={"psiv-on": {"gates": {"psiv_cache": True}}}))


def _trains_another_block(run: Run) -> bool:
    """Tell whether a trial of an attempt that is not kept yet has trained a step."""
    kept = json.loads((run.bundle / "blocks" / "0001" / "block.json").read_text())["attempt_id"]
    return any(kept not in path.parts for path in run.bundle.glob("work/att_*/*/steps.jsonl"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that was killed in its second block, at a moment when the block had a receipt already."""
    run = tiny(tmp_path_factory.mktemp("exec"), timed=50)
    process = run.start("--blocks", "1-2")
    until((run.bundle / "blocks" / "0001" / "block.json").exists)
    until(lambda: _trains_another_block(run))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    until(lambda: not processes_of(run.folder) and not links_into(run.folder))
    return run


def test_kill_costs_the_running_block_only_and_the_next_run_goes_on(killed: Run) -> None:
    before = (killed.bundle / "blocks" / "0001" / "block.json").read_text()
    (killed.bundle / "blocks" / "x.json.part").write_text("half")
    code, out, err = killed.execute("--blocks", "1-2", "--json", "--tar")
    assert code == 0, err
    answer = json.loads(out)
    assert (answer["block_indices_done"], answer["block_indices_missing"]) == ([0, 1], [2, 3, 4, 5])
    assert "in the bundle already, verified and kept: 1" in err
    assert "rehearsal" not in err
    assert "block 2/6, psiv-on: measured" in err
    assert (killed.bundle / "blocks" / "0001" / "block.json").read_text() == before
    bundle = killed.read()
    assert bundle.digests == (answer["digest"],)
    assert {t.receipt.outcome for b in bundle.blocks for t in b.trials} == {"measured"}
    assert "step    4 timed" in bundle.blocks[0].trials[0].log
    assert "USDT" not in bundle.blocks[0].trials[0].log, "the profiler's own lines"
    assert read_bundle_files(killed.folder / "bundle.tar") == read_bundle_files(killed.bundle)
    assert not processes_of(killed.folder)


def test_run_again_with_nothing_left_changes_nothing(killed: Run) -> None:
    before = read_bundle_files(killed.bundle)
    code, _out, _err = killed.execute("--blocks", "1")
    assert code == 0
    assert read_bundle_files(killed.bundle) == before


def test_another_plan_and_other_content_are_refused(killed: Run, tmp_path: Path) -> None:
    other = Run(killed.folder, tiny(tmp_path).file)
    code, _out, err = other.execute("--blocks", "3")
    assert code == 5
    assert "belongs to another plan" in err
    filled = Run(tmp_path, killed.file)
    filled.bundle.mkdir()
    (filled.bundle / "thesis.tex").touch()
    code, _out, err = filled.execute()
    assert code == 5
    assert "contains files that are no bundle" in err


def test_altered_receipt_is_refused_when_resuming(killed: Run) -> None:
    path = next(killed.bundle.glob(f"blocks/0001/*/{RECEIPT}"))
    text = path.read_text()
    path.write_text(text.replace('"position": 0', '"position": 1'))
    try:
        code, _out, err = killed.execute("--blocks", "3")
        assert code == 5
        assert f"{path.relative_to(killed.bundle)}: was altered" in err
    finally:
        path.write_text(text)


def test_node_of_another_class_is_refused_before_anything_runs(tmp_path: Path) -> None:
    file = make_file(placement={"node_class": "h200"}, variants={"psiv-on": {"gates": {"psiv_cache": True}}})
    run = Run(tmp_path, file)
    code, _out, err = run.execute()
    assert code == 5
    assert "this node is of class 'cpu'; the plan asks for 'h200'" in err
    assert not run.bundle.exists()


@pytest.mark.parametrize("slice_steps", [0, 2])
def test_stop_ends_the_trials_and_keeps_what_is_done(tmp_path: Path, slice_steps: int) -> None:
    run = tiny(tmp_path, timed=10_000, slice=slice_steps)
    process = run.start("--no-rehearse")
    until(lambda: len(list(run.bundle.glob("work/att_*/*/steps.jsonl"))) == (2 if slice_steps else 1))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 6
    assert "it was stopped (preempted); block 1 will run again whole" in err
    assert "0 of 6 blocks" in out
    assert run.read().blocks == ()
    assert not processes_of(run.folder)
    assert not links_into(run.folder)


def test_load_by_others_reruns_the_block_once_and_then_it_counts(tmp_path: Path) -> None:
    text = json.loads(tiny(tmp_path, timed=20).file.spec_text)
    text |= {"placement": {"node_class": "cpu", "max_foreign_load": "1%"}}
    strict = Run(tmp_path, make_file(**text))
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        code, _out, err = strict.execute("--blocks", "1", "--no-rehearse")
    finally:
        for process in spin:
            process.kill()
            process.wait()
    assert code == 0, err
    assert "block 1 broke, disturbed 1 of 2: arm 'baseline': others took" in err
    assert "busiest: python" in err
    bundle = strict.read()
    assert [record.failure_class for record in bundle.broken] == ["disturbed"]
    assert len(bundle.blocks) == 1
    (variant,) = judge_bundle(bundle).variants
    assert (variant.verdict, variant.cause) == ("inconclusive", "blocks are missing")
    assert "1 of 6 planned blocks counted" in variant.reason


def test_arms_that_are_late_again_have_it_as_their_result(tmp_path: Path) -> None:
    run = tiny(tmp_path, timed=10_000)
    text = json.loads(run.file.spec_text)
    slow = Run(tmp_path, make_file(**{**text, "limits": {"trial": "3s"}}))
    code, _out, err = slow.execute("--blocks", "1", "--no-rehearse")
    assert code == 0, err
    order = slow.file.plan.blocks[0].order
    assert "block 1 broke, timeout 1 of 2: arm 'baseline': the trial took longer than 3 s" in err
    bundle = slow.read()
    assert [(record.attempt_no, record.arm) for record in bundle.broken] == [*enumerate(order, start=1)]
    assert [trial.receipt.outcome for trial in bundle.blocks[0].trials] == ["timeout"] * len(order)
    attempts = judge_bundle(bundle).circumstances.attempts
    assert [(one.number, one.failure_class, one.arm) for one in attempts] == [
        (number, "timeout", arm) for number, arm in enumerate(order, start=1)
    ]


def test_import_follows_to_verdict_report_and_mlflow(killed: Run, tmp_path: Path) -> None:
    (tmp_path / "mlflow").mkdir()
    with mlflow_server.running(tmp_path / "mlflow") as url, running_api("sqlite", tmp_path, mlflow_url=url) as api:
        headers, keys = {**api.admin, "Content-Type": "application/x-tar"}, {"trust": sorted(killed.read().keys)}
        body = archive_of(read_bundle_files(killed.bundle))
        answer = api.client.post("/v1/ablations:import", headers=headers, params=keys, content=body)
        assert answer.status_code == 200, answer.text
        ablation = f"/v1/ablations/{killed.file.ablation_id}"
        handlers = OutboxHandlers(api.store)
        for kind in (OutboxKind.JUDGE, OutboxKind.REPORT):
            assert handlers.run_due(kind)
        assert projector(api.store, Sink(tracking_uri=url, experiment="ablate")).run_due()
        verdict = api.get(f"{ablation}/verdict").json()
        assert verdict["blocks_counted"] == len(killed.read().blocks)
        assert verdict["variants"][0]["decision"] == "inconclusive"
        assert "planned blocks counted: the imported bundles do not hold every block" in json.dumps(verdict)
        assert killed.file.ablation_id in api.get(f"{ablation}/report").text
        assert api.get(ablation).json()["mlflow_url"].startswith(without_credentials(url))


def test_exec_imports_nothing_that_an_air_gapped_node_lacks() -> None:
    code = (
        "import sys, ablate.workers.offline.__main__, ablate.workers.offline.cli, ablate.workers.processes.preload\n"
        f"print(sorted(set({HEAVY!r}.split()) & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_rehearsal_refuses_a_gate_that_is_not_live_and_a_baseline_that_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.exec_rehearsal", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    refused = answer["refused"]
    assert len(refused) == 2
    assert answer["progress"] == [["trl_rehearsal_1", 2, 2], ["trl_fails", 0, 2]]
    assert refused[0].startswith("arm 'arm-1': gate 'loss' was requested as 'chunked', observed 'dense'")
    assert refused[1] == (
        "the baseline does not train, so there is nothing to compare with: the trial took longer than 0 s"
    )


def test_a_kind_of_workload_in_a_file_of_its_own_runs_to_a_verdict(tmp_path: Path) -> None:
    """Its class is all that it adds, and an entry in `KINDS`."""
    command = [sys.executable, "-m", "tests.integration.fourth_kind", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    decision, delta_pct = json.loads(done.stdout)
    assert decision == "adopt"
    assert delta_pct == pytest.approx(-10.0)
