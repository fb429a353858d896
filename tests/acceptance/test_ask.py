"""`ablate ask` for real: from a folder with a program to a verdict, with a stack of its own."""

import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.acceptance.test_stack import Home
from tests.programs import LOOP, write_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A folder with a program whose data git ignores, and no stack."""
    folder = tmp_path_factory.mktemp("ask")
    made = Home(folder / "home")
    made.current = write_program(folder / "lab", LOOP + "\n    print('val loss', open('data/x.bin').read())")
    (made.current / ".gitignore").write_text("*.bin\n")
    (made.current / "data").mkdir()
    subprocess.run(["git", "init", "-q", "."], cwd=made.current, check=True)
    yield made
    made.run("down")


def test_a_slower_program_is_found_with_one_command(home: Home) -> None:
    (home.current / "data/x.bin").write_text("0.5")
    own = ["--", "python", "train.py", "--seed", "{seed}", "--step", "0.01"]
    closed = home.run("ask", "--vs=--step 0.05", *own)
    assert closed.returncode == 6, closed.stderr
    assert "write workload.data: [data/]" in closed.stderr
    assert not home.run("status").stdout.startswith("stack of"), "a check needs no stack"
    asked = home.run("ask", "--vs=--step 0.05", "--steps", "20", "--data", "data", *own)
    assert asked.returncode in {1, 3}, asked.stderr + asked.stdout
    assert "6/6 blocks" in asked.stdout
    assert "step-0-05" in asked.stdout
    spec = (home.current / "ask-step-0-05.yaml").read_text()
    assert re.search(r"metric: (tokens_per_s|cpu_step_s)\n", spec), "the second one on busy cores"
    for wrong in (["--vs-env", "wrong"], ["--vs=--name 'x"], ["--vs-commit", "none"], ["--vs=--a", "--vs=--b"], []):
        refused = home.run("ask", *wrong, *own)
        assert (refused.returncode, "Traceback" in refused.stderr) == (5, False), refused.stderr


def test_a_program_that_fails_alike_everywhere_ends_at_once(home: Home) -> None:
    (home.current / "data/x.bin").write_text("0.5")
    spec = home.current / "fails.yaml"
    spec.write_text((home.current / "ask-step-0-05.yaml").read_text())
    (home.current / "data/x.bin").unlink()
    ran = home.run("run", "fails.yaml")
    assert "baseline failed: user_error" in ran.stdout
    assert "5 not run" in ran.stdout
