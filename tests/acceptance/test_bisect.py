"""`ablate bisect` for real: a git history with a planted commit, and a stack that measures it."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.test_stack import Home

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SPEC = """
ablation: any
question: Which commit raised the loss?
workload:
  command: [python, train.py, "{seed}"]
  code: code
  metrics: {val: {better: lower, line: "val {}"}}
design: {seeds: 6, blocks: {count: 6}}
placement: {node_class: cpu, max_foreign_load: 99%}
verdict: {primary: {metric: val, margin: 0.5%}}
"""
PROGRAM = """
import random, sys
loss = 3.0 + random.Random({number} * 1000 + int(sys.argv[1])).gauss(0, 0.01)
print("val", loss * {factor})
"""
PLANTED, BROKEN, LAST = 6, 2, 8


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A folder with the history, and a stack."""
    made = Home(tmp_path / "home")
    made.current = tmp_path / "lab"
    (made.current / "code").mkdir(parents=True)
    (made.current / "spec.yaml").write_text(SPEC)
    git(made.current, "init", "-q", "-b", "main", ".")
    for number in range(LAST + 1):
        text = PROGRAM.format(number=number, factor=1.03 if number >= PLANTED else 1)
        (made.current / "code" / "train.py").write_text("raise SystemExit(1)" if number == BROKEN else text)
        git(made.current, "add", ".")
        git(made.current, "commit", "-qm", f"Change {number}")
    made.up()
    yield made
    made.run("down")


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True)


def test_the_planted_commit_is_named_and_the_same_command_measures_nothing_again(home: Home) -> None:
    command = ["bisect", "spec.yaml", "--good", f"HEAD~{LAST}"]
    done = home.run(*command)
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"Change {PLANTED} made the difference of " in done.stdout
    ablations = home.run("list", "--json").stdout
    again = home.run(*command, "--json")
    assert again.returncode == 0, again.stderr
    answer = json.loads(again.stdout.splitlines()[-1])["bisection"]
    assert len(answer["culprits"]) == 1
    assert answer["step_pct"] == pytest.approx(3, abs=1)
    assert home.run("list", "--json").stdout == ablations
