"""`ablate bisect` over real git histories; the measurements are drawn."""

import json
import random
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ablate.experiments.design.load import load_values, parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.outcomes import VerdictWord
from ablate.service.cli.commands import bisect as command
from ablate.service.cli.commits import bisecting

SPEC = """
ablation: any
question: Which commit made it slower?
workload: {command: [python, train.py, "{seed}"], code: code}
variants: {unused: {args: [--fast]}}
design: {seeds: 6, blocks: {count: 6}}
placement: {node_class: cpu}
verdict: {primary: {metric: process_s, margin: 1%}}
"""


class History:
    """A repository whose commits change the program, and the levels that they measure."""

    def __init__(
        self, folder: Path, levels: list[float | None], seed: int = 1, programs: list[int] | None = None
    ) -> None:
        self.folder = folder
        (folder / "code").mkdir()
        (folder / "spec.yaml").write_text(SPEC)
        self.git("init", "-q", "-b", "main")
        self.commits: list[str] = []
        for number, _level in enumerate([0.0, *levels]):
            (folder / "code" / "train.py").write_text(f"print({programs[number] if programs else number})\n")
            self.commit(f"Change {number}")
            self.commits.append(self.git("rev-parse", "HEAD"))
            (folder / "notes.txt").write_text(f"{number}\n")
            self.commit(f"Write about {number}")
        self.levels = dict(zip(self.commits, [0.0, *levels], strict=True))
        self.chance = random.Random(seed)  # noqa: S311
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []

    def git(self, *arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(["git", *who, *arguments], cwd=self.folder, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout.strip()

    def commit(self, subject: str) -> None:
        self.git("add", ".")
        self.git("commit", "-qm", subject)

    def run_spec(self, body: Any, *, idempotency_key: str, as_json: bool) -> tuple[str, Any]:
        values = load_values(body.content, body.content_type)
        self.bodies.append(values)
        self.keys.append(idempotency_key)
        assert values["labels"]["commit.baseline"] == self.commits[0]
        make_plan(parse_spec(body.content, body.content_type))  # as a service does: equal arms are refused
        variants = [self.measured(arm, values["labels"][f"commit.{arm}"]) for arm in values["variants"]]
        return "abl_1", SimpleNamespace(variants=tuple(variants))

    def measured(self, arm: str, commit: str) -> Any:
        level = self.levels[commit]
        if level is None:
            return SimpleNamespace(
                arm=arm, measured=VerdictWord.FAILED, reason="it failed.", primary=None, exact=None, decision="reject"
            )
        word = VerdictWord.WORSE if level > 1 else VerdictWord.SAME
        noisy = level + self.chance.gauss(0, 0.2)
        primary = SimpleNamespace(delta_pct=noisy, se_pct=0.2, blocks=6)
        return SimpleNamespace(arm=arm, measured=word, reason="it is so.", primary=primary, exact=None, decision="same")


def bisect(history: History, monkeypatch: pytest.MonkeyPatch, *options: str) -> Result:
    monkeypatch.setattr(bisecting, "run_spec", history.run_spec)
    monkeypatch.chdir(history.folder)
    return CliRunner().invoke(command.app, ["spec.yaml", "--good", history.commits[0], *options])


@pytest.mark.parametrize("seed", range(8))
def test_it_names_the_commit_of_a_drawn_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    last = chance.randint(1, 12)
    culprit = chance.randint(1, last)
    levels: list[float | None] = [5.0 * (place >= culprit) for place in range(1, last + 1)]
    broken = {place for place in range(1, last) if chance.random() < 0.2}
    for place in broken:
        levels[place - 1] = None
    history = History(tmp_path, levels, seed)
    done = bisect(history, monkeypatch, "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout.splitlines()[-1])["bisection"]
    places = [history.commits.index(commit) for commit in answer["culprits"]]
    assert culprit in places
    assert set(places[:-1]) <= broken, "only commits that cannot run stay beside another one"
    assert answer["probability"] >= 0.95
    assert set(answer["broken"]) <= {history.commits[place] for place in broken}
    assert answer["contradicting"] == []
    assert len(set(history.keys)) == len(history.keys)


@pytest.mark.parametrize("seed", range(12))
def test_reverts_give_commits_the_files_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Neighbours differ, and a commit may have the files of any other one on its side of the culprit."""
    chance = random.Random(seed)  # noqa: S311
    last = chance.randint(4, 16)
    culprit = chance.randint(1, last)
    programs = [0]
    for place in range(1, last + 1):
        side = range(1, 3) if place < culprit else range(3, 5)
        drawn = (0, *side) if place < culprit else tuple(side)
        programs.append(chance.choice([one for one in drawn if one != programs[-1]]))
    levels: list[float | None] = [5.0 * (place >= culprit) for place in range(1, last + 1)]
    history = History(tmp_path, levels, seed, programs)
    done = bisect(history, monkeypatch, "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout.splitlines()[-1])["bisection"]
    assert answer["culprits"] == [history.commits[culprit]]


def test_a_bad_commit_with_the_files_of_the_good_one_is_nothing_to_bisect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path, [5.0, 0.0], programs=[0, 1, 0])
    done = bisect(history, monkeypatch)
    assert done.exit_code == 3, done.output
    assert "nothing to bisect: the bad commit has the files of the good one" in done.output
    assert not history.bodies


def test_its_output_names_commit_and_probability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(tmp_path, [0.0, 0.0, 5.0, 5.0, 5.0])
    done = bisect(history, monkeypatch, "--at-once", "1")
    assert done.exit_code == 0, done.output
    assert "Change 3 made the difference of " in done.stdout
    assert "5 commits between them change the code" in done.output
    assert "the spec's variants do not run" in done.output
    assert all(len(body["variants"]) == 1 for body in history.bodies)
    before, culprit = history.commits[2][:12], history.commits[3][:12]
    assert f"confirm  ablate bisect SPEC --good {before} --bad {culprit}" in done.stdout


def test_several_commits_that_share_the_blame_are_no_single_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(tmp_path, [0.0, 5.0, 5.0, 5.0, 5.0, 5.0, 10.0, 10.0])
    done = bisect(history, monkeypatch)
    assert done.exit_code == 3, done.output
    assert "several commits share the blame" in done.stdout
    assert "after it   ablate bisect SPEC --good" in done.stdout


@pytest.mark.parametrize("seed", range(4))
def test_a_difference_that_came_and_went_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    levels: list[float | None] = [0.0, 5.0, 5.0, 0.0, 0.0, 5.0, 5.0, 5.0]  # the first round measures 2, 4 and 6
    history = History(tmp_path, levels, seed)
    done = bisect(history, monkeypatch)
    assert done.exit_code == 0, done.output
    first, but, *sides, confirm = done.stdout.splitlines()
    assert re.match("Change [26] made the difference of ", first.partition(" ")[2]), "one of those that made it"
    assert but.startswith("but no single commit made it: the difference came and went")
    assert confirm.startswith("  confirm  ")
    assert sides
    for side in sides:
        place, shift = re.fullmatch(r"  \w+ Change (\d): ([+-]\d\.\d\d) %", side).groups()  # type: ignore[union-attr]
        assert float(shift) == pytest.approx(levels[int(place) - 1], abs=1)
    json_done = bisect(history, monkeypatch, "--json")
    answer = json.loads(json_done.stdout.splitlines()[-1])["bisection"]
    culprit = history.commits.index(answer["culprits"][0])
    places = [history.commits.index(commit) for commit in answer["contradicting"]]
    assert [levels[place - 1] for place in places] == [0.0 if place > culprit else 5.0 for place in places] != []


@pytest.mark.parametrize("levels", [[0.0, 0.0], [0.0, None]])
def test_ends_without_a_difference_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, levels: list[float | None]
) -> None:
    history = History(tmp_path, levels)
    done = bisect(history, monkeypatch)
    assert done.exit_code in {2, 3}
    assert "nothing to bisect: no difference of the bad commit from the good one is proved" in done.output
    assert len(history.bodies) == 1


def test_what_cannot_be_bisected_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(tmp_path, [0.0, 5.0])
    history.git("checkout", "-q", "-b", "other", history.commits[1])
    (tmp_path / "code" / "train.py").write_text("print('other')\n")
    history.commit("Other")
    refusals = {
        ("--good", history.commits[2]): "is not an ancestor of",
        ("--bad", history.commits[0]): "changes the folder",
        ("--good", "nothing"): "has no commit 'nothing'",
    }
    for options, words in refusals.items():
        done = bisect(history, monkeypatch, *options)
        assert done.exit_code == 5, (options, done.output)
        assert words in " ".join(done.output.split()), (options, done.output)
    (tmp_path / "spec.yaml").write_text(SPEC.replace("code: code", "env: {A: b}"))
    done = bisect(history, monkeypatch)
    assert done.exit_code == 5
    assert "names none" in done.output
    assert not history.bodies
