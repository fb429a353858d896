"""Debian 12's Python 3.11.2: older than the tarfile filters of 3.11.4, and allowed by the README."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from ablate.experiments.records.plan_file import PlanWithCode
from tests.factories import command_values
from tests.programs import write_program
from tests.repositories import git
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
UNPACKING = ("test_code_archive.py", "test_spec_code.py", "test_bundle_files.py")


def old_python() -> str | None:
    """Return a Python 3.11.0 to 3.11.3 of this machine."""
    for path in {shutil.which("python3.11"), "/usr/bin/python3.11"} - {None}:
        if Path(path).exists():
            version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            if re.fullmatch(r"Python 3\.11\.[0-3]\n", version):
                return path
    return None


OLD = old_python()
pytestmark = pytest.mark.skipif(OLD is None, reason="no Python 3.11.0 to 3.11.3, such as that of Debian 12, is here")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of the old interpreter with this checkout and the packages of this one."""
    folder = tmp_path_factory.mktemp("old") / "venv"
    subprocess.run([str(OLD), "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = f"{ROOT / 'src'}\n{ROOT}\n{sysconfig.get_path('purelib')}\n"
    (folder / "lib/python3.11/site-packages/checkout.pth").write_text(packages)
    return folder / "bin/python"


def ablate(python: Path, *arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [str(python), "-c", "from ablate.experiments.system.console import main; main()", *arguments]
    environment = {"PATH": f"{python.parent}:{os.environ['PATH']}", "ABLATE_HOME": str(folder / "home")}
    environment["ABLATE_TRIAL_READABLE"] = sysconfig.get_path("purelib")  # packages beside the environment's own
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=LIMIT_S
    )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a spec and two commits of a program."""
    folder = tmp_path_factory.mktemp("lab")
    write_program(folder)
    (folder / "spec.yaml").write_text(yaml.safe_dump(command_values(workload__code=".")))
    git(folder, "init", "-q")
    for number in range(2):
        (folder / "number").write_text(str(number))
        git(folder, "add", "--all")
        git(folder, "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "x")
    return folder


def test_archives_are_packed_and_hostile_ones_refused(python: Path) -> None:
    files = [str(ROOT / "tests/unit/experiments/records" / name) for name in UNPACKING]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    options = ("-q", "-p", "pytest_timeout", "-p", "no:cacheprovider")
    command = [str(python), "-m", "pytest", *options, *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-3000:]


def test_check_runs_a_program_from_its_archive(python: Path, lab: Path) -> None:
    done = ablate(python, "check", "--", "python", "train.py", "--seed", "{seed}", folder=lab)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs" in done.stdout


def test_plan_packs_commits_as_a_new_python_does(python: Path, lab: Path) -> None:
    commits = ("--commit", "baseline=HEAD~1", "--commit", "fused=HEAD")
    planned = {}
    for name, interpreter in (("old", python), ("new", Path(sys.executable))):
        done = ablate(interpreter, "plan", "spec.yaml", *commits, "--out", f"{name}.tar", folder=lab)
        assert done.returncode == 0, done.stdout + done.stderr
        planned[name] = PlanWithCode(lab / f"{name}.tar").plan_file.code
    assert len(planned["old"]) == 2
    assert planned["old"] == planned["new"]
