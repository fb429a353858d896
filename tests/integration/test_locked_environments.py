"""Arms with packages of their own: the real command builds their environments in isolated processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.factories import command_values
from tests.package_index import package_index
from tests.programs import write_program
from tests.waiting import LIMIT_S

__all__ = ["package_index"]

_TRAINING = """
import ablate, colours
with ablate.trial(seed=1) as trial:
    for step in trial.steps():
        step.report(loss=1.0, tokens=100 * int(float(colours.VERSION)))
"""


def checked(folder: Path) -> dict[str, str]:
    """Return what `ablate check` says of each arm."""
    command = [str(Path(sys.executable).with_name("ablate")), "check", "--json", "spec.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    return {row["name"]: row["detail"] for row in json.loads(done.stdout)["checks"]}


def test_each_arm_runs_with_the_packages_of_its_lock(
    tmp_path: Path, package_index: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = write_program(tmp_path / "code", _TRAINING)
    spec = command_values(
        workload__command=["python", "train.py"],
        workload__code=".",
        workload__environment={"lock": "old.lock"},
        variants={"new": {"environment": {"lock": "new.lock"}}},
    )
    folder.joinpath("spec.yaml").write_text(yaml.safe_dump(spec))
    folder.joinpath("old.lock").write_text("colours==1.0\n")
    folder.joinpath("new.lock").write_text("colours==2.0\n")
    rows = checked(folder)
    assert "7 steps, 100 tokens in the last one" in rows["baseline"]
    assert "7 steps, 200 tokens in the last one" in rows["new"]
    downloads = len(package_index)
    folder.joinpath("new.lock").write_text("colours @ http://127.0.0.1/colours.whl\n")
    rows = checked(folder)
    assert "7 steps, 100 tokens in the last one" in rows["baseline"]
    assert "new.lock has 'colours @ http://127.0.0.1/colours.whl'; allowed: NAME==VERSION" in rows["new"]
    assert len(package_index) == downloads, "the old one was there"
