"""docs/ci.md, executed: its workflows and action.yml step by step, and its notebook, against a real service."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.answering import LESS_MEMORY, answering
from tests.api_stack import ADMIN, Api, api_fixture, served_api
from tests.architecture.pages import ROOT
from tests.cli import PROGRAM, environment, speaking_to
from tests.forges.fakes import TOKEN, FakeGitLab
from tests.forges.world import World, labels_of, world

ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
NOT_RUN = {
    "actions/checkout@v4": "needs GitHub; the folder is such a checkout",
    "actions/setup-python@v5": "needs GitHub; this Python runs",
    "Install": "needs a registry; the program is installed",
}
INSTALLING = ("git clone ", "python /tmp/ablate/requirements/install.py ")
"""Lines of GitLab's script that need a registry."""

api = api_fixture(served_api, kinds=["sqlite"], scope="module")


def blocks_of_the_page() -> list[Any]:
    """Return the YAML of the page: the spec, the workflow of GitHub, the job of GitLab."""
    text = (ROOT / "docs/ci.md").read_text(encoding="utf-8")
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]


SPEC_OF_THE_PAGE, WORKFLOW, PIPELINE = blocks_of_the_page()


def quick_spec() -> dict[str, Any]:
    """Return the page's spec, decided by the loss, which has no noise."""
    assert SPEC_OF_THE_PAGE["verdict"]["primary"]["metric"] == "tokens_per_s"
    exact = {"verdict": {"primary": {"metric": "loss_final", "margin": "0%"}}}
    return {**SPEC_OF_THE_PAGE, **exact, "design": {"seeds": [1], "blocks": {"count": 2}}}


@pytest.fixture
def github(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with speaking_to(api, monkeypatch), world("github", tmp_path, monkeypatch) as made:
        made.set_spec(quick_spec())
        yield made


@pytest.fixture
def gitlab(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with speaking_to(api, monkeypatch), world("gitlab", tmp_path, monkeypatch) as made:
        made.set_spec(quick_spec())
        yield made


@dataclass
class Job:
    """A job of GitHub's runner: the steps of the workflow, and those of the action below them."""

    lab: World
    variables: dict[str, str]
    ran: dict[str, int] = field(default_factory=dict)
    """Exit codes by step."""

    def run(self, url: str) -> "Job":
        (job,) = WORKFLOW["jobs"].values()
        known = {"vars.ABLATE_URL": url, "secrets.ABLATE_TOKEN": ADMIN, "github.token": TOKEN}
        for step in job["steps"]:
            if step["uses"] not in NOT_RUN:
                assert step["uses"] == "OWNER/ablate@v0.2.0"
                self._act({name: _filled(str(value), known) for name, value in step["with"].items()}, known)
        return self

    def _act(self, inputs: dict[str, str], known: dict[str, str]) -> None:
        assert inputs.keys() <= ACTION["inputs"].keys()
        needed = {name for name, one in ACTION["inputs"].items() if one.get("required")}
        assert needed <= inputs.keys()
        defaults = {name: one["default"] for name, one in ACTION["inputs"].items() if "default" in one}
        values = {name: _filled(value, known) for name, value in {**defaults, **inputs}.items()}
        known = {**known, **{f"inputs.{name}": value for name, value in values.items()}}
        for step in ACTION["runs"]["steps"]:
            name = step.get("name") or step["uses"]
            if name not in NOT_RUN and not any(self.ran.values()):
                own = {key: _filled(value, known) for key, value in step.get("env", {}).items()}
                assert "${{" not in step["run"], "an expression in a script is a hole for injected code"
                self.ran[name] = self._step(step["run"], own)

    def _step(self, commands: str, own: dict[str, str]) -> int:
        script, program = self.lab.folder / "step.sh", self.lab.folder / "ablate/bin/ablate"
        script.write_text(commands, encoding="utf-8")
        program.parent.mkdir(parents=True, exist_ok=True)
        program.unlink(missing_ok=True)
        program.symlink_to(PROGRAM)
        variables = {**os.environ, **self.variables, "RUNNER_TEMP": str(self.lab.folder), **own}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", script],
            cwd=self.lab.job,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        (self.lab.folder / "output.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
        return done.returncode


def _filled(text: str, known: dict[str, str]) -> str:
    return re.sub(r"\$\{\{ ([\w.-]+) \}\}", lambda match: known[match[1]], text)


def is_started(event: dict[str, Any]) -> bool:
    """Evaluate the `if` of the workflow as GitHub does, for an event in the repository lab/trainer."""

    def value(path: str) -> Any:
        at: Any = {"github": {"repository": "lab/trainer", "event": event}}
        for name in path.split("."):
            at = at.get(name) if isinstance(at, dict) else None
        return at

    (job,) = WORKFLOW["jobs"].values()
    text = re.sub(r"\bgithub(?:\.\w+)+", lambda match: f"value('{match[0]}')", " ".join(job["if"].split()))
    text = text.replace("&&", " and ").replace("||", " or ")
    functions = {"startsWith": lambda one, start: str(one).startswith(start), "fromJSON": json.loads}
    return bool(eval(text, {"value": value, "contains": lambda many, one: one in many, **functions}))  # noqa: S307


def push(repository: str | None) -> dict[str, Any]:
    return {"pull_request": {"head": {"repo": repository and {"full_name": repository}}}}


def comment(body: str, association: str, **issue: Any) -> dict[str, Any]:
    return {
        "comment": {"body": body, "author_association": association},
        "issue": {"pull_request": {"url": ""}, **issue},
    }


@pytest.mark.parametrize(
    ("event", "started"),
    [
        (push("lab/trainer"), True),
        (push("mallory/trainer"), False),
        (push(None), False),
        (comment("/ablate", "MEMBER"), True),
        (comment("/ablate --blocks 12", "OWNER"), True),
        (comment("/ablate", "COLLABORATOR"), True),
        (comment("/ablate", "CONTRIBUTOR"), False),
        (comment("/ablate", "NONE"), False),
        (comment("please /ablate", "OWNER"), False),
        (comment("/ablate", "OWNER", pull_request=None), False),
    ],
    ids=["own", "fork", "deleted fork", "member", "owner", "collaborator", "contributor", "stranger", "text", "issue"],
)
def test_the_workflow_starts_for_pushes_of_its_repository_and_comments_of_its_people(
    event: dict[str, Any], started: bool
) -> None:
    assert is_started(event) is started


def test_the_workflow_runs_nothing_of_the_head() -> None:
    events = WORKFLOW.get("on", WORKFLOW.get(True))  # YAML 1.1 reads the key `on` as true
    assert events.keys() == {"pull_request_target", "issue_comment"}
    assert events["issue_comment"] == {"types": ["created"]}, "an edited comment may be somebody else's text"
    assert WORKFLOW["permissions"] == {"contents": "read", "checks": "write", "pull-requests": "write"}
    (job,) = WORKFLOW["jobs"].values()
    checkout, action = job["steps"]
    assert checkout["with"] == {"fetch-depth": 0}, "any ref would be of the head"
    assert action.keys() == {"uses", "with"}


def test_a_push_is_measured_and_reported_by_the_steps_of_workflow_and_action(github: World, api: Api) -> None:
    with answering(api, reports=True):
        job = Job(github, github.pushed()).run(str(api.client.base_url))
    assert job.ran == {"Measure": 0}, (github.folder / "output.txt").read_text()
    assert github.ends == ["success"]
    assert "Does this pull request make training worse?" in github.comment
    assert labels_of(api)[0]["commit.baseline"] == github.merge_base


def test_a_comment_with_a_shells_signs_is_text(github: World, api: Api) -> None:
    job = Job(github, github.asked("--spec $(touch${IFS}hacked).yaml;`touch${IFS}hacked`")).run(
        str(api.client.base_url)
    )
    assert job.ran == {"Measure": 5}
    assert github.ends == ["failure"]
    assert "is not allowed" in github.comment
    assert list(github.folder.rglob("hacked")) == []


def test_a_spec_that_is_refused_fails_the_job_and_is_told(github: World, api: Api) -> None:
    github.set_spec({**quick_spec(), "seed": 1})
    assert Job(github, github.pushed()).run(str(api.client.base_url)).ran == {"Measure": 5}
    assert github.ends == ["failure"]
    assert "/seed" in github.comment


@pytest.mark.parametrize("is_asked", [False, True])
def test_the_script_for_gitlab_measures(gitlab: World, api: Api, is_asked: bool) -> None:
    assert isinstance(gitlab.forge, FakeGitLab)
    (job,) = PIPELINE.values()
    assert job["variables"] == {"GIT_DEPTH": "0"}
    lines = [line for line in job["script"] if not line.startswith(INSTALLING)]
    script = "\n".join(lines).replace("/tmp/ablate/.venv/bin/ablate", shlex.quote(str(PROGRAM)))  # noqa: S108
    variables = {**environment(api), **gitlab.pushed()}
    if is_asked:
        variables = {**environment(api), **gitlab.asked(""), "MERGE_REQUEST": "7", "ARGUMENTS": gitlab.forge.head}
    with answering(api):
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", script], cwd=gitlab.job, env=variables, capture_output=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert gitlab.ends == ["success"]
    assert "Met." in gitlab.comment


def test_the_rules_for_gitlab_leave_out_forks() -> None:
    (job,) = PIPELINE.values()
    pushed, asked = (rule["if"] for rule in job["rules"])
    assert "$CI_MERGE_REQUEST_SOURCE_PROJECT_ID == $CI_PROJECT_ID" in pushed
    assert "$CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH" in asked


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
