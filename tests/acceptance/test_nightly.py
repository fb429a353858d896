"""`ablate nightly` for real: a remote repository that changes night by night, and a stack that measures it."""

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.test_bisect import PROGRAM, SPEC
from tests.acceptance.test_stack import Home
from tests.receiver import receiving
from tests.repositories import git

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Lab:
    """A bare repository, somebody's clone that pushes to it, and a spec beside the code of another clone."""

    def __init__(self, home: Home, place: Path) -> None:
        self.home, self.origin, self.work = home, place / "origin.git", place / "work"
        git(place, "init", "-q", "--bare", "-b", "main", str(self.origin))
        git(place, "clone", "-q", str(self.origin), str(self.work))
        git(self.work, "config", "user.email", "a@example.org")
        git(self.work, "config", "user.name", "a")
        (self.work / "code").mkdir()
        (self.work / "spec.yaml").write_text(SPEC + "variants: {longer: {args: [--longer]}}\n")
        home.current = self.work

    def push(self, title: str, program: str | None = None) -> str:
        """Commit a program, or a change of another file, and push it."""
        if program is None:
            (self.work / "README").write_text(title)
        else:
            (self.work / "code" / "train.py").write_text(program)
        git(self.work, "add", ".")
        git(self.work, "commit", "-qm", title)
        git(self.work, "push", "-q", "--force", "origin", "HEAD:main")
        return git(self.work, "rev-parse", "HEAD")

    def night(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run the command once."""
        return self.home.run("nightly", "spec.yaml", "--pin", "v0", *options)

    def ablations(self) -> int:
        return len(json.loads(self.home.run("list", "--json").stdout))


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    home = Home(tmp_path / "home")
    home.environment["HOME"] = str(tmp_path / "user")
    made = Lab(home, tmp_path)
    made.push("Begin", PROGRAM.format(number=0, factor=1))
    git(made.work, "tag", "v0")
    git(made.work, "push", "-q", "origin", "v0")
    home.up()
    calibrated = home.run("aa", "cpu", "--like", "spec.yaml")
    assert calibrated.returncode == 0, calibrated.stderr
    yield made
    home.run("down")


def test_a_loss_is_told_once_when_two_ablations_prove_it_and_nothing_else_is(lab: Lab) -> None:
    with receiving() as receiver:
        notify = ("--notify", receiver.url.replace("http://", "json://"))
        lab.push("Only words")
        done = lab.night(*notify)
        assert (done.returncode, lab.ablations()) == (0, 1), done.stderr
        assert "nothing new: the code of " in done.stderr

        harmless = lab.push("Harmless", PROGRAM.format(number=1, factor=1))
        done = lab.night(*notify)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Harmless is accepted: not proved to be worse" in done.stdout
        assert (lab.ablations(), lab.night(*notify).returncode, lab.ablations()) == (2, 0, 2)

        lab.push("Only words again")
        planted = lab.push("Planted", PROGRAM.format(number=2, factor=1.03))
        assert not receiver.got
        done = lab.night(*notify, "--json")
        assert done.returncode == 1, done.stdout + done.stderr
        answer = json.loads(done.stdout.splitlines()[-1])["nightly"]
        assert (answer["word"], answer["commit"], len(answer["ablations"])) == ("worse", planted, 2)
        changes = [re.match(r"val \+(\S+)\s% \(.* interval\) against (\S+)", one) for one in answer["comparisons"]]
        assert all(one and float(one[1]) == pytest.approx(3, abs=1) for one in changes)
        [(_headers, body)] = receiver.got
        message = json.loads(body)
        assert "Planted is worse: two independent ablations prove it." in message["message"]
        assert f"the only commit after {harmless[:12]}" in message["message"]
        assert f"/a/{answer['ablations'][1]}" in message["message"]
        [picture] = message["attachments"]
        assert base64.b64decode(picture["base64"]).startswith(b"\x89PNG")
        assert (lab.night(*notify).returncode, lab.ablations(), len(receiver.got)) == (0, 4, 1)

        lab.push("Broken", "raise SystemExit(1)")
        done = lab.night(*notify)
        assert done.returncode == 4, done.stdout + done.stderr
        assert "Broken was not compared, so it is not accepted: " in done.stdout

        lab.push("Mended", PROGRAM.format(number=1, factor=1))
        done = lab.night(*notify)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "is that of the commit accepted, " in done.stderr
        assert len(receiver.got) == 1
    assert git(lab.work, "status", "--porcelain") == ""
