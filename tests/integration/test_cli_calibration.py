"""A/A ablations as people run them: planned by `ablate aa`, executed for real, read, imported, cited by verdicts."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ablate.experiments.analysis.noise.calibrate import calibrate, key_of
from ablate.experiments.design.plan import make_plan
from ablate.experiments.records.calibration import Calibration
from ablate.experiments.records.plan_file import read_plan_file
from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.lifecycle import OutboxKind
from tests.api_stack import Api, served_api
from tests.bundles import make_bundle, make_file, write_folder
from tests.calibrations import noisy_blocks
from tests.cli import ablate, speaking_to
from tests.factories import make_receipt, make_spec, spec_values
from tests.integration.test_exec import tiny
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    with served_api("sqlite", tmp_path / "api") as running, speaking_to(running, monkeypatch):
        yield running


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a spec, the plan of its A/A ablation, and the bundle that a real run made of six blocks."""
    folder = tmp_path_factory.mktemp("aa")
    (folder / "spec.json").write_text(tiny(folder).file.spec_text)
    code, _out, err = ablate("aa", "cpu", "--like", folder / "spec.json", "--blocks", 6, "--out", folder / "plan.json")
    assert code == 0, err
    command = [
        sys.executable,
        "-m",
        "ablate.workers.offline",
        str(folder / "plan.json"),
        "--out",
        str(folder / "bundle"),
    ]
    environment = {**os.environ, "ABLATE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_plan_holds_the_baseline_twice_and_another_order_each_time(executed: Path, tmp_path: Path) -> None:
    first = read_plan_file((executed / "plan.json").read_bytes())
    assert [arm.name for arm in first.plan.arms] == ["baseline", "repeat"]
    assert first.spec.purpose == "calibration"
    ablate("aa", "cpu", "--like", executed / "spec.json", "--blocks", 6, "--out", tmp_path / "again.json")
    again = read_plan_file((tmp_path / "again.json").read_bytes())
    assert again.spec.design.order_seed != first.spec.design.order_seed


def test_its_bundle_gives_a_calibration_that_a_verdict_cites_and_an_altered_one_is_refused(
    executed: Path, tmp_path: Path
) -> None:
    code, out, err = ablate("nodes", "calibration", executed / "bundle", "--json")
    assert code == 0, err
    (values,) = json.loads(out)
    made = Calibration.model_validate(values)
    assert (made.blocks, made.key.recipe) == (6, "hybrid-tiny")
    _code, out, _err = ablate("verdict", executed / "bundle", "--calibration", executed / "bundle", "--json")
    admission = json.loads(out)["circumstances"]["admission"]
    assert [one["digest"] for one in admission["calibrations"]] == [made.digest]
    assert "admit it" not in (admission["refused_because"] or ""), "six A/A blocks are enough"
    assert len({block.signed_by for block in made.samples}) == 1
    assert made.samples[0].signed_by is not None
    altered = shutil.copytree(executed / "bundle", tmp_path / "altered")
    receipt = next(altered.rglob("receipt.json"))
    receipt.write_text(receipt.read_text().replace('"wall_s": ', '"wall_s": 1'))
    code, _out, err = ablate("verdict", executed / "bundle", "--calibration", altered)
    assert (code, "was altered" in err) == (5, True)


def test_what_is_no_calibration_is_refused_by_name(executed: Path, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    code, _out, err = ablate("nodes", "calibration", tmp_path / "x.json")
    assert (code, "x.json" in err, "holds 0 manifests" in err or "is not a tar file" in err) == (5, True, True), err
    code, _out, err = ablate("verdict", "abl_01KAHZ3V5T8QW2R4Y6M9N0P1S3", "--calibration", executed / "bundle")
    assert (code, "--calibration is for bundles" in err) == (5, True)


def test_imported_blocks_are_known_to_the_service(api: Api, executed: Path) -> None:
    code, out, err = ablate("offline", "import", executed / "bundle", "--unsigned", "--json")
    if code:  # signed with a key that is not trusted yet
        key = read_key(executed / "bundle")
        code, out, err = ablate("offline", "import", executed / "bundle", "--trust", key, "--json")
    assert code == 0, err
    OutboxHandlers(api.store).run_due(OutboxKind.JUDGE)
    code, out, err = ablate("nodes", "calibration", "--json")
    assert code == 0, err
    (known,) = json.loads(out)["items"]
    assert known["calibration"]["blocks"] == 6
    imported = known["calibration"]["ablations"][0]
    assert known["mended_by"] == (known["problem"] and f"ablate aa cpu --like {imported}")
    code, out, err = ablate("aa", "cpu", "--like", imported, "--print")
    assert code == 0, err
    values = read_plan_file((executed / "plan.json").read_bytes()).spec.model_dump(mode="json")
    again: dict[str, Any] = yaml.safe_load(out)
    assert again["workload"]["overrides"] == values["workload"]["overrides"]
    assert (again["ablation"], again["design"]["blocks"]) == (values["ablation"], {"count": 20})


def read_key(bundle: Path) -> str:
    (node,) = (bundle / "nodes").iterdir()
    return str(json.loads(node.read_text())["registration"]["public_key"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cpu"], "exactly one of --like SPEC and --recipe NAME"),
        (["cpu", "--like", "demo", "--recipe", "hybrid-tiny"], "exactly one of"),
        (["cpux", "--like", "demo"], "unknown node class 'cpux'"),
        (["cpu", "--recipe", "hybrid-ref-h200"], "not meant for node class 'cpu'"),
        (["cpu", "--recipe", "nothing"], "unknown recipe 'nothing'"),
        (["cpu", "--like", "nothing"], "no catalog spec of that name"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_with_the_reason(arguments: list[str], message: str) -> None:
    code, _out, err = ablate("aa", *arguments, "--print")
    assert (code, message in err) == (5, True), err


def test_a_plan_for_a_node_that_reaches_nothing_is_sized_by_an_aa_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, plan = tmp_path / "spec.json", tmp_path / "plan.json"
    known = write_folder(make_bundle(make_file()), tmp_path / "aa")
    spec.write_text(json.dumps(spec_values(design__blocks="auto")))
    code, _out, err = ablate("plan", spec, "--out", plan)
    assert (code, "ablate aa cpu --like SPEC" in err, plan.exists()) == (5, True, False)
    like = make_spec()
    calibration = calibrate(key_of(like, make_receipt(make_plan(like), 0, "baseline")), noisy_blocks(sd=0.02))
    monkeypatch.setattr("ablate.service.cli.calibrations.calibrations_of", lambda *_: (calibration,))
    code, _out, err = ablate("plan", spec, "--out", plan, "--calibration", known)
    assert code == 0, err
    file = read_plan_file(plan.read_bytes())
    assert file.spec.design.blocks.number == len(file.plan.blocks) > 6
    assert file.spec_text.startswith(f"# blocks: auto gave {len(file.plan.blocks)}")
    code, _out, err = ablate("plan", spec, "--calibration", known)
    assert (code, "--calibration is for bundles and for plan --out" in err) == (5, True)
