"""The README's first command, for real: about two minutes on two idle cores."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.pages import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def _processes_of(home: Path) -> list[str]:
    commands = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"ABLATE_HOME={home}".encode() in environment and command:
            commands.append(command)
    return commands


def check_demo(program: Path, home: Path, *, cwd: Path) -> None:
    """Run the demo in a new home; check its verdict, its report and that no process is left."""
    done = subprocess.run(
        [program, "demo", "--json"],
        env={**os.environ, "ABLATE_HOME": str(home), "ABLATE_PORT": str(18_000 + os.getpid() % 10_000)},
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    verdicts = {variant["arm"]: variant["verdict"] for variant in summary["verdict"]["variants"]}
    assert verdicts == {"chunk-16": "better", "chunked-loss": "same", "psiv-on": "worse"}, "exact, on any machine"
    assert summary["verdict"]["circumstances"]["admission"]["calibrations"] == [], "none is needed"
    assert summary["verdict"]["blocks_counted"] == 4
    assert any(pointer.startswith("#/variants/") for pointer in summary["refused_spec"])
    assert re.search(r"/#/experiments/\d+/runs/[0-9a-f]{32}\?workflowType=machine_learning$", summary["mlflow_url"])
    report = Path(summary["report"])
    assert report.is_relative_to(home)
    assert summary["ablation"] in report.read_text(encoding="utf-8")
    assert _processes_of(home) == []
    assert not (home / "stack.json").exists()


def test_demo_ends_with_a_verdict_a_report_and_no_process(tmp_path: Path) -> None:
    check_demo(Path(sys.executable).with_name("ablate"), tmp_path / "home", cwd=ROOT)
