"""A plan carries the code of its arms to a node without a service, and its bundle proves that this code ran."""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ablate.experiments.documents import seal
from ablate.experiments.errors import BundleError, PlanFileError
from ablate.experiments.records.bundle_files import PLAN, RECEIPT, read_bundle_files
from ablate.experiments.records.bundle_reader import open_bundle
from ablate.experiments.records.code_archive import pack_code
from ablate.experiments.records.plan_file import PlanWithCode, read_plan_file
from ablate.experiments.records.program_report import ProgramReport
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.records.signing import Signer
from ablate.workers.node import KEY_FILE, node_signer
from tests.api_stack import running_api
from tests.bundles import archive_of, sealed
from tests.programs import write_program
from tests.waiting import LIMIT_S

FOLDERS = ("src", "other", "judging")
ROOT = Path(__file__).resolve().parents[2]


def ablate(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command of `ablate` in `folder`."""
    environment = {**os.environ, "ABLATE_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).with_name("ablate")), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program, another version of it, its spec and its plan."""
    folder = tmp_path_factory.mktemp("lab")
    write_program(folder / "src")
    write_program(folder / "other", (folder / "src/train.py").read_text() + "\n# changed\n")
    write_program(folder / "judging", "")
    folder.joinpath("judging/judge.py").write_text("print('METRIC val_loss=1.5')")
    spec = {
        "ablation": "carried",
        "question": "Is the other version as fast?",
        "workload": {
            "command": ["python", "train.py", "--seed", "{seed}", "--step", "0.002"],
            "code": "./src",
            "steps": {"warmup": 1, "timed": 20},
            "metrics": {"val_loss": {"better": "lower"}},
            "evaluate": {"command": ["python", "judge.py"], "code": "judging"},
        },
        "variants": {"other": {"code": "other"}},
        "design": {"seeds": [1], "blocks": {"count": 6}},
        "placement": {"node_class": "cpu", "max_foreign_load": "99%"},
        "verdict": {"primary": {"metric": "tokens_per_s", "margin": "5%", "adopt_if": "10%"}},
    }
    folder.joinpath("spec.yaml").write_text(yaml.safe_dump(spec))
    planned = ablate("plan", "spec.yaml", "--out", "plan.tar", folder=folder)
    assert planned.returncode == 0, planned.stderr
    assert "ablate offline exec plan.tar" in planned.stdout
    assert "code ./src: 1 file, " in planned.stderr
    return folder


def test_a_plan_with_code_is_one_tar_file_with_a_readable_plan(lab: Path) -> None:
    with tarfile.open(lab / "plan.tar") as tar:
        names = tar.getnames()
    digests = {pack_code(lab / name).digest: pack_code(lab / name).tree for name in FOLDERS}
    assert names == ["README.txt", "plan.json", *(f"code/{digest[7:]}.tar.gz" for digest in sorted(digests))]
    planned = PlanWithCode(lab / "plan.tar")
    assert planned.plan_file.code == digests
    assert "sha256" in planned.plan_file.spec_text
    refused = ablate("plan", "spec.yaml", "--out", "plan.json", folder=lab)
    assert refused.returncode == 5
    assert "--out plan.tar" in refused.stderr
    assert not lab.joinpath("plan.json").exists()
    lab.joinpath("by-digest.yaml").write_text(planned.plan_file.spec_text)
    refused = ablate("plan", "by-digest.yaml", "--out", "other.tar", folder=lab)
    assert refused.returncode == 5
    assert "#/variants/other/code" in refused.stderr
    assert "is not here" in refused.stderr


def test_the_node_runs_the_carried_code_and_the_import_proves_it(lab: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.tar"
    plan.write_bytes(lab.joinpath("plan.tar").read_bytes())
    ran = ablate("offline", "exec", "plan.tar", "--out", "bundle", "--json", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    trees = {"baseline": pack_code(lab / "src").tree, "other": pack_code(lab / "other").tree}
    trees["control"] = trees["baseline"]
    files = read_bundle_files(tmp_path / "bundle")
    bundle = open_bundle(files)
    receipts = [trial.receipt for block in bundle.blocks for trial in block.trials]
    assert len(receipts) == 18
    judging = pack_code(lab / "judging").tree
    assert all(one.program and one.program.evaluation and one.program.evaluation.code == judging for one in receipts)
    assert all(receipt.program and receipt.program.reported["val_loss"] == 1.5 for receipt in receipts)
    assert all(receipt.program and receipt.program.code == trees[receipt.arm] for receipt in receipts)
    assert sum(map(len, files.values())) < 2_000_000, "the bundle names the code, and does not have it"
    with running_api("sqlite", tmp_path / "api") as api:
        trust = {"trust": json.loads(ran.stdout)["key"]}
        headers = {**api.admin, "Content-Type": "application/x-tar"}
        answer = api.client.post("/v1/ablations:import", params=trust, headers=headers, content=archive_of(files))
        assert answer.status_code == 200, answer.text
    signer = node_signer(tmp_path / "home" / KEY_FILE)
    assert open_bundle(resigned(files, "other", signer, lambda report: report)).keys == bundle.keys

    def other_code(report: ProgramReport) -> ProgramReport:
        return report.model_copy(update={"code": trees["baseline"]})

    def other_evaluation(report: ProgramReport) -> ProgramReport:
        evaluation = report.evaluation and report.evaluation.model_copy(update={"code": trees["other"]})
        return report.model_copy(update={"evaluation": evaluation})

    ran_other = f"ran code {trees['baseline']}; the plan has {trees['other']} for arm 'other'"
    judged_by_other = f"evaluated with code {trees['other']}; the plan has {judging}"
    for change, words in ((other_code, ran_other), (other_evaluation, judged_by_other)):
        with pytest.raises(BundleError) as caught:
            open_bundle(resigned(files, "other", signer, change))
        assert [problem.detail for problem in caught.value.problems] == [words]


def resigned(
    files: dict[str, bytes], arm: str, signer: Signer, change: Callable[[ProgramReport], ProgramReport]
) -> dict[str, bytes]:
    """Return a bundle whose owner changed the code in a receipt and signed everything again."""
    path = next(path for path in sorted(files) if path.endswith(f"-{arm}/{RECEIPT}"))
    receipt = Receipt.model_validate_json(files[path])
    assert receipt.program is not None
    lie = seal(receipt.model_copy(update={"program": change(receipt.program)}))
    return sealed(read_plan_file(files[PLAN]), {**files, path: lie.model_dump_json().encode()}, signer)


def changed(plan: Path, target: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """Copy a plan's tar file with changed members; None leaves one out."""
    with tarfile.open(plan) as old, tarfile.open(target, "w") as new:
        for member in old:
            source = old.extractfile(member)
            assert source is not None
            content = change(member.name, source.read())
            if content is not None:
                member.size = len(content)
                new.addfile(member, io.BytesIO(content))
    return target


def test_an_altered_or_missing_archive_stops_a_run_before_it_begins(lab: Path, tmp_path: Path) -> None:
    def altered(name: str, content: bytes) -> bytes:
        return content[:-1] + b"x" if name.startswith("code/") else content

    def missing(name: str, content: bytes) -> bytes | None:
        return None if name.startswith("code/") else content

    def no_plan(name: str, content: bytes) -> bytes | None:
        return None if name == PLAN else content

    for change, words in ((altered, "was altered"), (missing, "no plan with code/"), (no_plan, "plan.json")):
        plan = changed(lab / "plan.tar", tmp_path / f"{change.__name__}.tar", change)
        with pytest.raises(PlanFileError, match=words):
            PlanWithCode(plan)
        ran = ablate("offline", "exec", plan.name, "--out", "bundle", folder=tmp_path)
        assert (ran.returncode, "refused" in ran.stderr, words in ran.stderr.replace("\n", " ")) == (5, True, True)
    with tarfile.open(lab / "plan.tar") as tar:
        source = tar.extractfile(PLAN)
        assert source is not None
        tmp_path.joinpath("plan.json").write_bytes(source.read())
    with pytest.raises(PlanFileError, match=r"carry the tar file"):
        PlanWithCode(tmp_path / "plan.json")
    for content in (b"", b"\x1f\x8b", b"x" * 2000, bytes(10_240)):
        tmp_path.joinpath("junk").write_bytes(content)
        with pytest.raises(PlanFileError):
            PlanWithCode(tmp_path / "junk")
