"""`ablate nightly` for real: a remote repository that changes night by night, and a stack that measures it."""

import base64
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.test_bisect import PROGRAM as NOISY
from tests.acceptance.test_bisect import SPEC
from tests.acceptance.test_stack import Home
from tests.integration.test_notifications import mail_server
from tests.receiver import receiving
from tests.repositories import git
from tests.waiting import until

PROGRAM = NOISY.replace("0.01", "0.003")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Lab:
    """A bare repository, somebody's clone that pushes to it, and a spec beside the code of another clone."""

    def __init__(self, home: Home, place: Path, name: str) -> None:
        self.home, self.place, self.origin, self.work = home, place, place / "origin.git", place / "work"
        self.name = name
        git(place, "init", "-q", "--bare", "-b", "main", str(self.origin))
        git(place, "clone", "-q", str(self.origin), str(self.work))
        git(self.work, "config", "user.email", "a@example.org")
        git(self.work, "config", "user.name", "a")
        (self.work / "code").mkdir()
        spec = SPEC.replace("ablation: any", f"ablation: {name}")
        (self.work / "spec.yaml").write_text(f"{spec}variants: {{longer: {{args: [--longer]}}}}\n")
        self.push("Begin", number=0)
        git(self.work, "tag", "v0")
        git(self.work, "push", "-q", "origin", "v0")

    def push(self, title: str, *, number: int | None = None, factor: float = 1, program: str = PROGRAM) -> str:
        """Commit a program, or a change of another file without a number, and push it."""
        if number is None:
            (self.work / "README").write_text(title)
        else:
            (self.work / "code" / "train.py").write_text(program.format(number=number, factor=factor))
        git(self.work, "add", ".")
        git(self.work, "commit", "-qm", title)
        git(self.work, "push", "-q", "--force", "origin", "HEAD:main")
        return git(self.work, "rev-parse", "HEAD")

    def start(self, *options: str, user: str = "user") -> "subprocess.Popen[str]":
        """Start the command once, as a user of that home folder."""
        command = [
            *self.home.program,
            "nightly",
            "spec.yaml",
            *(() if "--pin" in options else ("--pin", "v0")),
            *options,
        ]
        environment, pipe = {**self.home.environment, "HOME": str(self.place / user)}, subprocess.PIPE
        return subprocess.Popen(command, cwd=self.work, env=environment, stdout=pipe, stderr=pipe, text=True)

    def night(self, *options: str) -> tuple[int, str, str]:
        """Run the command once; return its exit code and its output."""
        return ended(self.start(*options))

    def ablations(self) -> list[str]:
        listed = json.loads(self.home.run("list", "--label", f"nightly.branch={self.name}/main", "--json").stdout)
        return [row["state"] for row in listed]

    def seeds(self, ablation: str) -> set[int]:
        return set(json.loads(self.home.run("verdict", ablation, "--json").stdout)["seeds"]["used"])


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A stack whose node is calibrated for the program."""
    place = tmp_path_factory.mktemp("nightly")
    made = Home(place / "home")
    made.up()
    made.current = Lab(made, place, "calibrates").work
    calibrated = made.run("aa", "cpu", "--like", "spec.yaml")
    assert calibrated.returncode == 0, calibrated.stderr
    yield made
    made.run("down")


def test_a_loss_is_told_once_when_two_ablations_prove_it_and_nothing_else_is(home: Home, tmp_path: Path) -> None:
    lab = Lab(home, tmp_path, "story")
    with receiving() as receiver, mail_server() as mail:
        to = f"mailto://127.0.0.1:{mail.server_address[1]}?from=lab@example.org&to=ada@example.org&mode=insecure"
        notify = ("--notify", receiver.url.replace("http://", "json://"), "--notify", to)
        lab.push("Only words")
        code, _out, err = lab.night(*notify)
        assert (code, lab.ablations()) == (0, []), err
        assert "nothing new: the code of " in err

        harmless = lab.push("Harmless", number=1)
        code, out, err = lab.night(*notify)
        assert code == 0, out + err
        assert "Harmless is accepted: not proved to be worse" in out
        assert (lab.night(*notify)[0], lab.ablations()) == (0, ["completed"])

        lab.push("Only words again")
        planted = lab.push("Planted", number=2, factor=1.03)
        assert not receiver.got
        receiver.statuses = [500]
        code, out, err = lab.night(*notify, "--json")
        assert code == 1, out + err
        answer = json.loads(out.splitlines()[-1])["nightly"]
        assert (answer["word"], answer["commit"], len(answer["ablations"])) == ("worse", planted, 2)
        assert len(set().union(*(lab.seeds(one) for one in answer["ablations"]))) == 12, "of two independent ablations"
        assert planted[:8] in home.run("history", "command", "--metric", "val").stdout
        changes = [re.match(r"val \+(\S+)\s% \(.* interval\) against (\S+)", one) for one in answer["comparisons"]]
        assert all(one and float(one[1]) == pytest.approx(3, abs=1) for one in changes)
        assert "did not take the message; the next call repeats it: " in err
        assert len(answer["unsent"]) == len(receiver.got) == len(mail.mails) == 1
        [letter] = mail.mails
        assert "To: ada@example.org" in letter
        assert "image/png" in letter

        assert lab.night(*notify)[0] == 0
        message = json.loads(receiver.got[1][1])
        assert "Planted is worse: two independent ablations prove it." in message["message"]
        assert f"the only commit after {harmless[:12]}" in message["message"]
        assert f"/a/{answer['ablations'][1]}" in message["message"]
        [picture] = message["attachments"]
        assert base64.b64decode(picture["base64"]).startswith(b"\x89PNG")
        assert (lab.night(*notify)[0], lab.ablations()) == (0, ["completed"] * 3)
    assert git(lab.work, "status", "--porcelain") == ""


def test_a_commit_that_does_not_run_is_not_accepted_and_one_that_goes_back_is_not_asked(
    home: Home, tmp_path: Path
) -> None:
    lab = Lab(home, tmp_path, "broken")
    lab.push("Broken", number=1, program="raise SystemExit(1)")
    code, out, err = lab.night()
    assert code == 4, out + err
    assert "Broken was not compared, so it is not accepted: " in out
    lab.push("Mended", number=0)
    code, out, err = lab.night()
    assert code == 0, out + err
    assert "is that of the commit accepted, " in err
    assert lab.ablations() == ["completed"]


def test_a_call_that_is_killed_is_finished_by_the_next_which_names_the_culprit(home: Home, tmp_path: Path) -> None:
    lab = Lab(home, tmp_path, "killed")
    for number in range(1, 5):
        lab.push(f"Change {number}", number=number, factor=1.03 if number >= 3 else 1)
    assert lab.night("--every", "5")[0] == 0
    assert lab.ablations() == []
    first = lab.start("--every", "4")
    until(lab.ablations)
    first.kill()
    ended(first)
    later = lab.push("Later", number=5, factor=1.03)
    with receiving() as receiver:
        code, out, err = lab.night("--bisect", "--notify", receiver.url.replace("http://", "json://"))
        assert code == 1, out + err
        assert out.count("Change 4 is worse: ") == out.count("Later is worse: ") == 1, "both were compared with v0"
        assert "Change 3 made the difference of " in json.loads(receiver.got[0][1])["message"], out + err
    assert len(lab.ablations()) == 4
    git(lab.work, "reset", "-q", "--hard", "v0")
    kept = lab.push("Kept", number=6)
    code, out, err = lab.night("--json")
    assert code == 0, out + err
    answer = json.loads(out.splitlines()[-1])["nightly"]
    assert (answer["commit"], answer["word"], len(answer["comparisons"])) == (kept, "accepted", 1)
    code, _out, err = lab.night("--pin", later)
    assert code == 5
    assert "is no commit in the history of the fetched branch" in err


def test_two_calls_at_once_ask_once(home: Home, tmp_path: Path) -> None:
    lab = Lab(home, tmp_path, "twice")
    lab.push("Harmless", number=1)
    calls = [lab.start(user="ada"), lab.start(user="ada"), lab.start("--repo", str(lab.origin), user="bob")]
    codes, outs, errs = zip(*map(ended, calls), strict=True)
    assert sorted(codes[:2]) == [0, 5], errs
    assert "another `ablate nightly` of twice/main is running here" in "".join(errs[:2])
    assert codes[2] == 0
    assert lab.ablations() == ["completed"]
    assert sum("Harmless is accepted" in out for out in outs) >= 1


def test_an_ablation_that_was_cancelled_is_asked_again_by_the_next_call(home: Home, tmp_path: Path) -> None:
    lab = Lab(home, tmp_path, "cancelled")
    lab.push("Slow", number=1, program=f"import time; time.sleep(1)\n{PROGRAM}")
    call = lab.start()
    until(lab.ablations)
    assert home.run("cancel", "latest").returncode == 0
    code, out, err = ended(call)
    assert code == 5, out + err
    code, out, err = lab.night()
    assert code == 0, out + err
    assert "Slow is accepted" in out
    assert lab.ablations() == ["completed", "cancelled"]
