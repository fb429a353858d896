"""What .ci/run does with the targets of the Makefile: run as it is, with a `make` that writes down what is asked."""

import ast
import importlib
import os
import re
import runpy
import shutil
import subprocess
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kernels import xla_device
from tests import nightly
from tests.architecture.pages import ROOT
from tests.long_tests import EXCEPT, LONG, is_long, is_long_file

MAKE = """#!/bin/sh
echo "$1" >> targets
echo "closing line of $1"
case " $FAILING " in *" $1 "*) exit 3;; esac
"""

SAID = ("test-containers", "chaos", "test-tpu", "nightly-result", "test")
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


@pytest.mark.parametrize("failing", ["", "nightly-result"])
def test_the_last_runs_of_what_is_not_run_decide(tmp_path: Path, failing: str) -> None:
    status, targets, output = integrated(tmp_path, lane=False, failing=failing)
    assert (status, targets) == (
        3 * bool(failing),
        ["chaos", "check", "install", "nightly-result", "test", "test-containers"],
    )
    assert "lane xla: NOT RUN, .venv-tpu is not there (make tpu)" in output
    assert f"--- make nightly-result {'FAILED' if failing else 'passed'}" in output


@pytest.mark.parametrize("name", [*nightly.TARGETS])
@pytest.mark.parametrize(
    ("changes", "days", "problem"),
    [
        ({}, 0, None),
        ({}, 14, None),
        ({}, 15, "the last run is 15 days old; allowed: 14"),
        ({"failed": 1}, 0, "1 tests failed and 90 passed"),
        ({"passed": 0}, 0, "0 tests failed and 0 passed"),
        ({"kernels": "others"}, 0, "kernels/ has changed since the last run"),
    ],
)
def test_a_run_that_failed_or_is_old_or_had_other_kernels_is_a_problem(
    name: str, changes: dict[str, Any], days: int, problem: str | None
) -> None:
    date = datetime(2026, 11, 26, 4, tzinfo=UTC)
    values = {"kernels": "these", "passed": 90, "skipped": 2, "failed": 0, **changes}
    run = nightly.Run(date=date.isoformat(), commit="abc", seconds=1, processor_seconds=2, **values)
    answer = run.problem(name, date + timedelta(days=days), "these")
    assert answer == problem if problem is None else str(answer).startswith(f"{name}: {problem}")


def test_the_stored_runs_can_be_read() -> None:
    runs = nightly.stored()
    assert set(runs) == set(nightly.TARGETS)
    assert all(run.passed for run in runs.values())


def test_a_run_that_is_missing_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nightly, "stored", dict)
    assert nightly.show(datetime.now(UTC)) == 1
    assert capsys.readouterr().out.count("never run; run make nightly") == len(nightly.TARGETS)


def test_nightly_compiles_every_kernel_before_it_stores_its_result() -> None:
    command = ["make", "--dry-run", "--old-file=.venv/.installed", "--old-file=.venv-tpu/.installed", "nightly"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split(" -m ")[1] for line in lines if " -m " in line] == [
        "pytest --every-kernel tests/kernels/test_mamba3_cuda_budgets.py",
        "tests.chaos --count 12 --seed 1 --store both ",
        "tests.nightly",
    ]


@pytest.mark.parametrize("failing", ["", *SAID])
def test_with_it_one_target_runs_it_and_any_failure_is_the_end(tmp_path: Path, failing: str) -> None:
    status, targets, output = integrated(tmp_path, lane=True, failing=failing)
    assert (status, targets) == (
        3 if failing else 0,
        ["chaos", "check", "install", "nightly-result", "test", "test-containers", "test-tpu"],
    )
    assert "NOT RUN" not in output
    ends = {target: "FAILED" if target == failing else "passed" for target in SAID}
    lines = (
        f"--- make {target} {end}; its closing lines ---\nclosing line of {target}\n" for target, end in ends.items()
    )
    assert output.endswith("".join(lines))


def test_what_does_not_pass_the_checks_is_not_tested(tmp_path: Path) -> None:
    status, targets, _ = integrated(tmp_path, lane=True, failing="check")
    assert (status, targets) == (3, ["chaos", "check", "install"])


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


LANE_TESTS = [*(ROOT / "tests" / "xla").glob("*.py"), *(ROOT / "tests" / "kernels").glob("*xla*.py")]


@pytest.mark.parametrize("path", LANE_TESTS, ids=lambda path: path.stem)
def test_the_tests_of_lane_xla_import_and_use_names_that_exist(path: Path) -> None:
    """Their environment is rarely there, so a renamed function would be noticed late."""
    owners: dict[str, ModuleType | type] = {}
    missing = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OWN:
            home = importlib.import_module(str(node.module))
            for alias in node.names:
                with suppress(ImportError):
                    importlib.import_module(f"{node.module}.{alias.name}")
                value = getattr(home, alias.name, None)
                missing += [] if hasattr(home, alias.name) else [f"{node.module}.{alias.name}"]
                if isinstance(value, ModuleType | type):
                    owners[alias.asname or alias.name] = value
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                pass
            case ast.Call(
                func=ast.Attribute(attr="setattr"), args=[ast.Name(id=owner), ast.Constant(value=str(name)), _]
            ):
                pass
            case _:
                continue
        missing += [] if owner not in owners or hasattr(owners[owner], name) else [f"{owner}.{name}"]
    assert missing == []


OWN = ("kernels", "model", "experiments", "workers", "service")


@pytest.mark.parametrize("name", [*LONG, *EXCEPT])
def test_a_long_test_exists(name: str) -> None:
    path, _, test = name.partition("::")
    files = [one for one in (ROOT / "tests").rglob("test_*.py") if one.relative_to(ROOT).as_posix().startswith(path)]
    assert [one for one in files if f"def {test.partition('[')[0]}" in one.read_text(encoding="utf-8")]


def test_the_lengths_divide_all_tests() -> None:
    assert [is_long(name) for name in (LONG[0], EXCEPT[0], "tests/unit/test_x.py::test_y")] == [True, False, False]
    assert [name for name in EXCEPT if not name.startswith(LONG)] == []
    ends = ("[sqlite]", "[postgresql]", "[sqlite-1]", "[postgresql-2]")
    stores = [f"tests/integration/test_x.py::test_y{end}" for end in ends]
    assert [is_long(name, stores) for name in stores] == [True, False, False, False], "only a twin stands for a test"


def test_a_file_is_left_out_whole_only_if_all_its_tests_are_long() -> None:
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    left_out = {path for path in files if is_long_file(path)}
    assert {"tests/simulation/test_words.py", "tests/acceptance/test_demo.py"} <= left_out
    short = ("tests/unit/model/test_train.py", "tests/kernels/test_oracle.py", "tests/acceptance/test_stack.py")
    assert not left_out & {*short, *(name.partition("::")[0] for name in EXCEPT)}
    assert all(is_long(f"{path}::test_x") for path in left_out)
