"""What .ci/run does with the targets of the Makefile: run as it is, with a `make` that writes down what is asked."""

import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels import xla_device
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


def test_the_check_after_the_installation_of_lane_xla_calls_functions_that_exist() -> None:
    check = runpy.run_path(str(ROOT / "requirements" / "install_tpu.py"))["CHECK"]
    names = re.findall(r"xla_device\.(\w+)\(", check)
    assert names
    assert [name for name in names if not callable(getattr(xla_device, name, None))] == []


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_stand_ins_for_cuda_keep_their_symbols_when_they_are_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "torch" / "lib"
    folder.mkdir(parents=True)
    (tmp_path / "empty.c").write_text("")
    (tmp_path / "user.c").write_text("void ncclGetUniqueId(void); void use(void) { ncclGetUniqueId(); }")
    library, user = folder / "libnccl.so.2", folder / "libtorch_cuda.so"
    for target, source, *linked in ((library, "empty.c"), (user, "user.c", "-Wl,--no-as-needed", str(library))):
        soname = f"-Wl,-soname,{target.name}"
        command = ["gcc", "-shared", "-fPIC", soname, "-o", str(target), str(tmp_path / source), *linked]
        subprocess.run(command, check=True)
    write = runpy.run_path(str(ROOT / "requirements" / "cuda_stubs.py"))["main"]
    for _ in range(2):
        write(tmp_path)
        symbols = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True).stdout
        assert "T ncclGetUniqueId" in symbols
