"""A pull request on a fake forge, with a real git server behind it, and a job's checkout."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.api_stack import Api
from tests.cli import Done, ablate
from tests.forges.fakes import FakeForge, FakeGitHub, FakeGitLab, serving
from tests.forges.git_server import Hosted, git_server
from tests.repositories import git

SPEC = "ablations/pull-request.yaml"
FORGES = {"github": FakeGitHub, "gitlab": FakeGitLab}
REFERENCES = {"github": "refs/pull/7/head", "gitlab": "refs/merge-requests/7/head"}
VALUES: dict[str, Any] = {
    "ablation": "pull-request",
    "question": "Does this pull request make training worse?",
    "workload": {
        "command": ["python", "train.py", "--seed", "{seed}"],
        "code": "../training",
        "steps": {"warmup": 1, "timed": 3},
    },
    "variants": {"pull-request": {"code": "../training"}},
    "design": {"seeds": [1], "blocks": {"count": 2}},
    "placement": {"node_class": "cpu"},
    "verdict": {"primary": {"metric": "loss_final", "margin": "0%"}},
}
"""A spec that is decided by the loss, which has no noise."""
NOISY = {
    **VALUES,
    "design": {"seeds": [1], "blocks": {"count": 6}},
    "verdict": {"primary": {"metric": "tokens_per_s", "margin": "2%"}},
}
"""A spec that no node decides without a calibration."""


@dataclass
class World:
    """The forge, the repository and the job of one pull request."""

    forge: FakeForge
    hosted: Hosted
    job: Path
    """The checkout of the job."""
    folder: Path
    merge_base: str
    patch: pytest.MonkeyPatch

    @property
    def reference(self) -> str:
        return REFERENCES["github" if isinstance(self.forge, FakeGitHub) else "gitlab"]

    def push(self, source: str, *, from_fork: bool = False) -> str:
        """Push a commit to the pull request, and return it."""
        head = self.hosted.commit("Change it", {"training/train.py": source})
        self.hosted.push(head, self.reference, *(() if from_fork else ("refs/heads/faster",)))
        self.forge.head = head
        return head

    def set_spec(self, values: dict[str, Any], name: str = SPEC) -> None:
        """Change a spec in the target branch, whose tip the forge then names."""
        git(self.hosted.person, "checkout", "-q", "main")
        self.forge.base = self.hosted.commit("Ask", {name: yaml.safe_dump(values)})
        self.hosted.push(self.forge.base, "refs/heads/main")
        git(self.hosted.person, "checkout", "-q", "faster")

    def asked(self, text: str, **who: Any) -> dict[str, str]:
        """Return the variables of a job that somebody asked for, who may push."""
        if isinstance(self.forge, FakeGitHub):
            self.forge.permissions.setdefault("grace", "write")
            return self.forge.asked(self.folder, f"/ablate {text}".strip(), **who)
        assert isinstance(self.forge, FakeGitLab)
        return {**self.forge.pipeline(CI_COMMIT_SHA=self.forge.base, CI_MERGE_REQUEST_IID=""), "WORDS": text}

    def pushed(self) -> dict[str, str]:
        """Return the variables of a job that a push started."""
        if isinstance(self.forge, FakeGitHub):
            return self.forge.event(self.folder)
        assert isinstance(self.forge, FakeGitLab)
        return self.forge.pipeline()

    def run(self, variables: dict[str, str] | None = None, *options: str) -> Done:
        """Run the command as the job does."""
        own = {**(self.pushed() if variables is None else variables)}
        words = own.pop("WORDS", None)
        for name, value in own.items():
            self.patch.setenv(name, value)
        self.patch.chdir(self.job)
        asked = () if words is None else ("--merge-request", "7", "--arguments", words)
        return ablate("pull-request", SPEC, *asked, *options)

    @property
    def ends(self) -> list[str]:
        """The states of the check that are final."""
        return [
            state for _commit, state, _title in self.forge.states if state not in ("queued", "in_progress", "pending")
        ]

    @property
    def comment(self) -> str:
        [text] = self.forge.own
        return text


@contextmanager
def world(kind: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[World]:
    """Make history: main m0 - m1 - m2, the pull request m0 - p1 - merge of m1 - p2, so that m1 is the merge base."""
    with git_server(folder / "git") as hosted:
        hosted.commit("m0", {SPEC: yaml.safe_dump(VALUES), "training/train.py": "print(0)\n"})
        person = hosted.person
        git(person, "checkout", "-q", "-b", "faster")
        hosted.commit("p1", {"training/faster.py": "print(1)\n"})
        git(person, "checkout", "-q", "main")
        start = hosted.commit("m1", {"training/other.py": "print(1)\n"})
        git(person, "checkout", "-q", "faster")
        hosted.merge("main")
        git(person, "checkout", "-q", "main")
        base = hosted.commit("m2", {"training/later.py": "print(2)\n"})
        hosted.push(base, "refs/heads/main")
        git(person, "checkout", "-q", "faster")
        forge = FORGES[kind](head="", base=base)
        with serving(forge):
            made = World(forge, hosted, hosted.checkout(folder / "job", "main"), folder, start, patch)
            made.push(f"print({folder.name!r})\n")
            yield made


def labels_of(api: Api) -> list[dict[str, str]]:
    """Return the labels of all ablations, newest first."""
    rows = api.get("/v1/ablations?limit=500").json()["items"]
    return [dict(row["labels"]) for row in rows]
