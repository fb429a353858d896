"""What comes from a service, a node or a trial steers no terminal, however it is printed."""

import io
import json
import random
import re

import pytest
from rich.console import Console

from ablate.experiments.system.logs import UNSEEN
from ablate.service.cli import tables
from ablate.service.cli.output import err, out, print_json, print_text, show_problem
from ablate.service.schemas.nodes import NodePublic, NodeRuns
from ablate.service.schemas.problems import Problem, ProblemDetail
from tests.public_rows import ablation_row

HOSTILE = [
    "\x1b[31mred\x1b[0m",
    "\x1b]0;a new title\x07",
    "\x1b]52;c;ZXZpbA==\x07",
    "\x1b[2J\x1b[H",
    "\x9b2J",
    "\x1bc",
    "over\rwritten",
    "back\b\b\bspace",
    "\u202eesrever\u202c",
    "\x1bP+q\x1b\\",
    "\x0e shifted \x0f",
    "\x1b[?1049h",
    "a\x00b\x7fc\x85d",
]
_OURS = re.compile(r"\x1b\[[0-9;]*m")
"""Colours, which the console itself asks for."""


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _node(text: str) -> NodePublic:
    return NodePublic(
        id="nod_1",
        name=f"gpu-{text}",
        node_class="cpu",
        health="live",
        state="quarantined",
        quarantined_reason=text,
        stopped_by=text,
        stopped_at="2026-11-20T00:00:00Z",
        lanes={"cuda": text},
        devices=[],
        devices_free=0,
        versions={},
        code_digest="sha256:c",
        lacks=[text],
        public_key=None,
        registered_at="2026-11-22T00:00:00.000Z",
        seen_at="2026-11-22T00:00:00.000Z",
        runs=[NodeRuns(ablation="abl_1", name=text, block_index=0, devices=1, arms=[text])],
    )


def _texts() -> list[str]:
    draw = random.Random(10)  # noqa: S311 - draws that repeat
    signs = [*HOSTILE, "plain ", "[bold]", "é", "中", "\n", "[/]"]
    return [*HOSTILE, *("".join(draw.choices(signs, k=6)) for _ in range(40))]


@pytest.mark.parametrize("on_terminal", [True, False], ids=["terminal", "file"])
@pytest.mark.parametrize("text", _texts())
def test_nothing_from_outside_steers_a_terminal(text: str, on_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stdout, stderr = (_Terminal(), _Terminal()) if on_terminal else (io.StringIO(), io.StringIO())
    monkeypatch.setattr("sys.stdout", stdout)
    monkeypatch.setattr("sys.stderr", stderr)
    out().print(tables.nodes([_node(text)]))
    out().print(tables.ablations([ablation_row(name=text, waiting_for=text)]))
    print_text(text)
    print_json(_node(text))
    problem = Problem(title="x", detail=text, errors=(ProblemDetail(pointer=text, detail=text, hint=text),))
    show_problem(problem)
    show_problem(problem, as_json=True)
    for written in (stdout.getvalue(), stderr.getvalue()):
        left = UNSEEN.findall(_OURS.sub("", written) if on_terminal else written)
        assert left == [], written


def test_json_means_what_it_meant(capsys: pytest.CaptureFixture[str]) -> None:
    for text in _texts():
        print_json({"text": text})
        assert json.loads(capsys.readouterr().out) == {"text": text}


def test_colours_of_this_program_still_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", _Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    console = out()
    console.print("[bold red]bad[/] news")
    assert "\x1b[1;31mbad" in console.file.getvalue()  # type: ignore[attr-defined]


def test_every_console_of_the_commands_is_harmless() -> None:
    assert type(out()) is type(err()) is not Console
    assert issubclass(type(out()), Console)
