"""docs/ci.md, executed: its workflow step by step in a shell as GitHub's, and its notebook, against a real service."""

import os
import re
import stat
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ablate.experiments.reporting.terminal.markdown import MAX_CHARS
from tests.answering import LESS_MEMORY, answering
from tests.api_stack import ADMIN, Api, api_fixture, served_api
from tests.architecture.pages import ROOT
from tests.cli import PROGRAM, environment
from tests.programs import write_program

NOT_RUN = {
    "actions/checkout@v4": "needs GitHub; the folder holds the spec",
    "actions/setup-python@v5": "needs GitHub; this Python runs",
    "actions/upload-artifact@v4": "needs GitHub; the file is looked at",
    "Install": "needs a registry; the program is installed",
}
SHELL = ["bash", "-e"]
"""What GitHub runs a step with when the step names no shell; then the file with its commands."""
GH = """#!/bin/sh
echo "$@" > "$COMMENTED"
while [ $# -gt 0 ]; do [ "$1" = --body-file ] && cp "$2" "$COMMENTED.md"; shift; done
"""
"""Stands in for `gh`: keeps what it was asked, and the comment."""


api = api_fixture(served_api, kinds=["sqlite"], scope="module")


def workflow() -> dict[str, Any]:
    text = (ROOT / "docs/ci.md").read_text(encoding="utf-8")
    _, block = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    return dict(yaml.safe_load(block))


def spec_of_the_page(**changes: Any) -> dict[str, Any]:
    """Return the page's spec, decided by the loss, which has no noise."""
    text = (ROOT / "docs/ci.md").read_text(encoding="utf-8")
    block, _ = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    spec = dict(yaml.safe_load(block))
    assert spec["verdict"]["primary"]["metric"] == "tokens_per_s"
    exact = {"verdict": {"primary": {"metric": "loss_final", "margin": "0%"}}}
    return {**spec, **exact, "design": {"seeds": [1], "blocks": {"count": 2}}, **changes}


@dataclass
class Job:
    """The job's steps in a folder, with the service that its variables name."""

    folder: Path
    url: str
    base: str
    """The commit from which the pull request started."""
    commit: str
    """The newest commit of the pull request."""
    ran: dict[str, int] = field(default_factory=dict)
    """Exit codes of the steps that were run."""

    def run(self, *, until: str = "") -> "Job":
        (job,) = workflow()["jobs"].values()
        variables = {name: self._filled(str(value)) for name, value in job["env"].items()}
        for step in job["steps"]:
            name = step.get("name") or step["uses"]
            if name not in NOT_RUN and self._is_due(step):
                own = {key: self._filled(str(value)) for key, value in step.get("env", {}).items()}
                self.ran[name] = self._step(self._filled(step["run"]), {**variables, **own})
            if name == until:
                break
        return self

    @property
    def comment(self) -> str:
        return (self.folder / "commented.md").read_text(encoding="utf-8")

    def _is_due(self, step: dict[str, Any]) -> bool:
        condition = step.get("if")
        assert condition in (None, "${{ !cancelled() }}"), "a condition that this runner does not know"
        return condition is not None or not any(self.ran.values())

    def _filled(self, text: str) -> str:
        known = {
            "vars.ABLATE_URL": self.url,
            "secrets.ABLATE_TOKEN": ADMIN,
            "github.token": "a-token-of-github",
            "github.event.pull_request.number": "7",
            "github.event.pull_request.base.sha": self.base,
            "github.event.pull_request.head.sha": self.commit,
        }
        return re.sub(r"\$\{\{ ([\w.]+) \}\}", lambda match: known[match[1]], text)

    def _step(self, commands: str, variables: dict[str, str]) -> int:
        script, handed = self.folder / "step.sh", self.folder / "github_env"
        script.write_text(commands, encoding="utf-8")
        earlier = handed.read_text().splitlines() if handed.exists() else []
        given = {
            **os.environ,
            **variables,
            **dict(line.split("=", 1) for line in earlier),
            "PATH": f"{self.folder}:{PROGRAM.parent}:{os.environ['PATH']}",
            "GITHUB_ENV": str(handed),
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary.md"),
            "COMMENTED": str(self.folder / "commented"),
        }
        done = subprocess.run([*SHELL, script], cwd=self.folder, env=given, capture_output=True, text=True, check=False)
        (self.folder / "said.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
        return done.returncode


def committed(folder: Path, source: str) -> str:
    """Commit a program into the repository of a folder; return the commit."""
    write_program(folder / "training", source)
    git = ("git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "training"), ("commit", "-qm", "x")):
        subprocess.run([*git, *command], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def job(folder: Path, api: Api, spec: dict[str, Any]) -> Job:
    base, commit = (committed(folder, source) for source in ("print(1)", f"print({folder.name!r})"))
    (folder / "ablations").mkdir(exist_ok=True)
    (folder / "ablations/pull-request.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
    gh = folder / "gh"
    gh.write_text(GH, encoding="utf-8")
    gh.chmod(gh.stat().st_mode | stat.S_IXUSR)
    return Job(folder, str(api.client.base_url), base, commit)


def test_the_workflow_is_one_that_github_can_read() -> None:
    document = workflow()
    assert {"name", "permissions", "jobs"} <= set(document)
    assert True in document or "on" in document, "YAML 1.1 reads the key `on` as true"
    (one,) = document["jobs"].values()
    assert one["runs-on"]
    assert [step for step in one["steps"] if ("uses" in step) == ("run" in step)] == [], "one of the two in every step"
    assert set(NOT_RUN) <= {step.get("name") or step["uses"] for step in one["steps"]}


def test_a_pull_request_that_changes_nothing_passes_and_is_told(api: Api, tmp_path: Path) -> None:
    made = job(tmp_path, api, spec_of_the_page())
    with answering(api, reports=True):
        ran = made.run()
    assert ran.ran == dict.fromkeys(["Plan", "Submit", "Wait", "Verdict", "Comment"], 0), (
        tmp_path / "said.txt"
    ).read_text()
    assert ran.comment.startswith("**Required of every variant: not-worse. Met.**")
    assert "Does this pull request make training worse?" in ran.comment
    assert f"`baseline` is commit {made.base[:12]}, `pull-request` is commit {made.commit[:12]}" in ran.comment
    assert f"[page]({made.url}" in ran.comment
    assert len(ran.comment) <= MAX_CHARS
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == ran.comment
    assert "pr comment 7 --body-file verdict.md" in (tmp_path / "commented").read_text()
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")
    before = len(api.get("/v1/ablations").json()["items"])
    assert made.run(until="Submit").ran.items() >= {"Plan": 0, "Submit": 0}.items()
    assert len(api.get("/v1/ablations").json()["items"]) == before, "the same commit asks nothing twice"


def test_a_pull_request_that_makes_the_loss_worse_fails_and_is_told(api: Api, tmp_path: Path) -> None:
    with answering(api, {"pull-request": {"more_loss": 0.01}}, reports=True):
        ran = job(tmp_path, api, spec_of_the_page()).run()
    assert ran.ran == {"Plan": 0, "Submit": 0, "Wait": 0, "Verdict": 1, "Comment": 0}
    assert "Not met: `pull-request` is worse" in ran.comment


def test_a_spec_that_is_refused_ends_before_anything_runs(api: Api, tmp_path: Path) -> None:
    ran = job(tmp_path, api, spec_of_the_page(seed=1))
    assert ran.run().ran == {"Plan": 5, "Comment": 0}
    assert not (tmp_path / "commented").exists()


def test_the_notebook_runs_whole(api: Api) -> None:
    changed = {"chunk-16": LESS_MEMORY["psiv-on"]}
    with answering(api, changed):
        done = subprocess.run(
            [sys.executable, ROOT / "docs/examples/ask.py"],
            env=environment(api),
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "2 blocks of baseline, chunk-16" in done.stdout
    assert "the spec has 2 problems\n  #/" in done.stdout, "the spec that is wrong on purpose"
    assert "notebook completed" in done.stdout
    assert "chunk-16 better adopt" in done.stdout
    assert done.stdout.count("trl_") == 4
