"""What .ci/run does with the targets of the Makefile: run as it is, with a `make` that writes down what is asked."""

import ast
import importlib
import os
import re
import runpy
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from ablate.kernels.xla import device as xla_device
from tests import nightly
from tests.architecture.pages import ROOT
from tests.long_tests import EXCEPT, LONG

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


def test_the_stored_runs_can_be_read() -> None:
    runs = nightly.stored()
    assert set(runs) == set(nightly.TARGETS)
    assert all(run.passed for run in runs.values())


@pytest.mark.parametrize("failing", ["", "test-containers", "test"])
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


def test_every_long_test_exists() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")}

    def exists(name: str) -> bool:
        path, _, test = name.partition("::")
        return any(f"def {test.partition('[')[0]}" in text for file, text in texts.items() if file.startswith(path))

    assert [name for name in (*LONG, *EXCEPT) if not exists(name)] == []
    assert [name for name in EXCEPT if not name.startswith(LONG)] == []
