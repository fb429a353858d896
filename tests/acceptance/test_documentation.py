"""Every command of every page, as a reader types it, on one real stack that all pages share.

`ablate` runs in this process, whose start would cost more than the commands; everything else goes through a shell.
"""

import os
import re
import shlex
import subprocess
import sys
import webbrowser
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ablate.experiments.design.aa_spec import CONTENT_TYPE
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.outcomes import ExitCode
from ablate.experiments.records.plan_file import make_plan_file
from ablate.experiments.system import console
from ablate.service.client.settings import get_client_settings
from ablate.service.settings import get_settings
from tests.api_stack import SIGNER
from tests.architecture.pages import ROOT
from tests.bundles import make_bundle, make_file, write_folder
from tests.calibrations import aa_text
from tests.console_blocks import KINDS, PAGES, Command, all_commands, commands_of, without_comment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NODE = "reader"
BIN = Path(sys.executable).parent
TYPED = sorted(
    (page for page in PAGES if any(command.kind is None for command in commands_of(page))),
    key=lambda page: page != "docs/first-spec.md",
)
"""Pages with commands that run here; the first of them leaves an ablation that others read as `latest`."""
FROM_THE_ROOT = ("make ", "source ")
"""Commands that a reader types in the repository; all others run in a folder of the page's own."""


class Stack:
    """The stack that the pages share, and the program `ablate` in this process."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.program = console.build(entry_points(group=console.GROUP))

    def make(self, target: str) -> str:
        """Run a target of the Makefile with this environment's program; return what it printed."""
        words = ["make", "--old-file=.venv/.installed", f"BIN={BIN}", target]
        return self._shell(shlex.join(words), ROOT)

    def run(self, command: Command, folder: Path) -> None:
        """Run one command and see that it ends as it must."""
        text = self._filled(command.text)
        if text.startswith("make down"):
            return  # once, when all pages are done
        if text.startswith("make "):
            self.make(text.split()[1])
        elif text.startswith("ablate "):
            self._ablate(command, text, folder)
        else:
            self._shell(text, ROOT if text.startswith(FROM_THE_ROOT) else folder)

    def _filled(self, text: str) -> str:
        filled = without_comment(text)
        for word, value in (("NODE", NODE), ("KEY", SIGNER.key)):
            filled = re.sub(rf"\b{word}\b", value, filled)
        return filled

    def _ablate(self, command: Command, text: str, folder: Path) -> None:
        line, _, target = text.partition(" > ")
        words = shlex.split(line)[1:]
        done = CliRunner().invoke(self.program, words, catch_exceptions=False)
        if target:
            (folder / target.strip()).write_text(done.stdout)
        problem = f"{command} ended with {done.exit_code}: {done.output}"
        if "# refused" in command.text:
            assert done.exit_code == ExitCode.ERROR, problem
        else:
            highest = ExitCode.INVALID if words[0] == "verdict" else ExitCode.DONE  # a verdict says its decision
            assert done.exit_code <= highest, problem

    def _shell(self, text: str, folder: Path) -> str:
        done = subprocess.run(
            ["bash", "-euc", text],
            env=self.environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{text}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("docs") / "home"
    port = str(18_000 + os.getpid() % 10_000)
    ours = {"ABLATE_HOME": str(home), "ABLATE_PORT": port, "ABLATE_NODE_NAME": NODE}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ours.items():
            patch.setenv(name, value)
        patch.setattr(webbrowser, "open", lambda _url: True)
        patch.setattr(os, "execv", lambda *_words: pytest.fail("a command that becomes another program"))
        get_settings.cache_clear()
        get_client_settings.cache_clear()
        made = Stack({**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"})
        made.make("up")
        try:
            yield made
        finally:
            ended = made.make("down")
            get_settings.cache_clear()
            get_client_settings.cache_clear()
    assert "no process is left" in ended


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that pages speak of: a spec, and bundles that came back from another node."""
    (tmp_path / "spec.yaml").write_text(make_file().spec_text)
    write_folder(make_bundle(make_file(), signer=SIGNER), tmp_path / "bundle")
    text = aa_text(blocks=6)
    aa = make_plan_file(make_plan(parse_spec(text, CONTENT_TYPE)), spec_text=text.decode(), content_type=CONTENT_TYPE)
    write_folder(make_bundle(aa), tmp_path / "aa-bundle")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", TYPED)
def test_commands_of_a_page_work_in_their_order(page: str, stack: Stack, folder: Path) -> None:
    for command in commands_of(page):
        if command.kind is None:
            stack.run(command, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_commands_that_are_not_run_here(kind: str) -> None:
    left = [str(command) for command in all_commands() if command.kind == kind]
    assert left, f"no page has such a command any more: take {kind!r} out of KINDS"
    pytest.skip(f"not run here, {kind}: {'; '.join(left)}")
