"""What .ci/run does with the targets of the Makefile: run as it is, with a `make` that writes down what is asked."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.architecture.pages import ROOT

MAKE = """#!/bin/sh
echo "$1" >> targets
echo "closing line of $1"
case " $FAILING " in *" $1 "*) exit 3;; esac
"""

SAID = ("test-containers", "chaos", "test-tpu", "test")
"""What is said at the end, in this order: whoever reads only the last count of tests reads that of all of them."""


def integrated(folder: Path, *, lane: bool, failing: str = "") -> tuple[int, list[str], str]:
    """Run .ci/run in `folder`, with or without the environment of lane xla; return status, targets (sorted), output."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    programs = [folder / "bin" / "make", *([folder / ".venv-tpu" / "bin" / "python"] if lane else [])]
    for program in programs:
        program.parent.mkdir(parents=True)
        program.write_text(MAKE)
        program.chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    ended = subprocess.run(
        [str(folder / ".ci" / "run")],
        env={**os.environ, "PATH": path, "FAILING": failing},
        capture_output=True,
        text=True,
        check=False,
    )
    targets = (folder / "targets").read_text().split()
    return ended.returncode, sorted(targets), ended.stdout


def test_without_its_environment_lane_xla_is_said_not_to_have_run(tmp_path: Path) -> None:
    status, targets, said = integrated(tmp_path, lane=False)
    assert (status, targets) == (0, ["chaos", "check", "test", "test-containers"])
    assert "lane xla: NOT RUN, .venv-tpu is not there (make tpu)" in said


@pytest.mark.parametrize("failing", ["", *SAID])
def test_with_it_one_target_runs_it_and_any_failure_is_the_end(tmp_path: Path, failing: str) -> None:
    status, targets, said = integrated(tmp_path, lane=True, failing=failing)
    assert (status, targets) == (3 if failing else 0, ["chaos", "check", "test", "test-containers", "test-tpu"])
    assert "NOT RUN" not in said
    ends = {target: "FAILED" if target == failing else "passed" for target in SAID}
    lines = (
        f"--- make {target} {end}; its closing lines ---\nclosing line of {target}\n" for target, end in ends.items()
    )
    assert said.endswith("".join(lines))


def test_what_does_not_pass_the_checks_is_not_tested(tmp_path: Path) -> None:
    status, targets, _ = integrated(tmp_path, lane=True, failing="check")
    assert (status, targets) == (3, ["check"])
