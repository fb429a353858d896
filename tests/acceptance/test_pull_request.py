"""`ablate pull-request` for real, for each forge: a planted change, a git server, a stack that measures it."""

from pathlib import Path

import pytest

from tests.acceptance.test_stack import Home
from tests.forges.world import SPEC, world
from tests.programs import LOOP
from tests.repositories import git

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("kind", "loss", "state"),
    [
        ("github", "1.03", "failure"),
        ("github", "2 * 0.5", "success"),
        ("gitlab", "1.03", "failed"),
        ("gitlab", "2 * 0.5", "success"),
    ],
)
def test_an_approved_commit_of_a_fork_gets_the_verdict_that_was_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, loss: str, state: str
) -> None:
    home = Home(tmp_path / "home")
    with world(kind, tmp_path, monkeypatch) as lab:
        git(lab.hosted.person, "checkout", "-q", "main")
        lab.forge.base = lab.hosted.commit("Train", {"training/train.py": LOOP})
        lab.hosted.push(lab.forge.base, "refs/heads/main")
        git(lab.hosted.person, "checkout", "-q", "-B", "faster", "main")
        lab.forge.is_fork = True
        head = lab.push(LOOP.replace("loss=1.0", f"loss={loss}"), from_fork=True)
        git(lab.job, "pull", "-q")
        home.current = lab.job
        variables = lab.asked(head)
        asked = ("--merge-request", "7", "--arguments", variables.pop("WORDS")) if kind == "gitlab" else ()
        home.environment |= {**variables, "ABLATE_ACCEPT_CODE": "true"}
        home.up()
        try:
            done = home.run("pull-request", SPEC, *asked)
        finally:
            home.run("down")
        assert done.returncode == 0, done.stderr + done.stdout
        assert lab.ends == [state], lab.comment
        assert {commit for commit, _state, _title in lab.forge.states} == {head}
        assert f"`pull-request` is commit {head[:12]}" in lab.comment
