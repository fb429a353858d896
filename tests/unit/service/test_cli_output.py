import io
import json
from pathlib import Path

import pytest
import typer
from rich.console import Console

from ablate.experiments.errors import SpecError, SpecProblem
from ablate.service.cli import stack_commands
from ablate.service.cli.follow import steps_text
from ablate.service.cli.output import guarded, problem_lines
from ablate.service.client.api import Refused
from ablate.service.http import links
from ablate.service.schemas.ablations import Event
from ablate.service.schemas.problems import Problem, ProblemDetail
from ablate.service.stack.layout import StackFiles
from tests.unit.service.test_stack_layout import STATE

PROBLEM = Problem(
    title="Unprocessable Content",
    status=422,
    detail="the spec has 1 problem",
    errors=(ProblemDetail(pointer="#/variants/a[b]", detail="unknown gate 'x'", hint="did you mean 'y'?"),),
    request_id="req_1",
)


def test_problem_lines_show_pointer_detail_hint_and_request() -> None:
    text = "\n".join(problem_lines(PROBLEM))
    for part in ("Unprocessable Content", "422", "unknown gate 'x'", "did you mean 'y'?", "req_1"):
        assert part in text


def test_problem_lines_escape_what_looks_like_markup() -> None:
    assert r"#/variants/a\[b]" in "\n".join(problem_lines(PROBLEM))


def test_guarded_prints_a_refusal_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    @guarded
    def command(as_json: bool = False) -> None:
        raise Refused(PROBLEM)

    with pytest.raises(typer.Exit) as ending:
        command()
    assert ending.value.exit_code == 5
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "hint: did you mean 'y'?" in printed.err
    assert "Traceback" not in printed.err


def test_guarded_prints_the_document_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    @guarded
    def command(as_json: bool = False) -> None:
        raise SpecError([SpecProblem(pointer="#/a", detail="wrong")])

    with pytest.raises(typer.Exit):
        command(as_json=True)
    document = json.loads(capsys.readouterr().err)
    assert document == {"title": "The spec is not acceptable", "errors": [{"pointer": "#/a", "detail": "wrong"}]}


def test_guarded_lets_our_own_bugs_through() -> None:
    @guarded
    def command() -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        command()


def test_steps_text_names_steps_speed_and_loss() -> None:
    data = {"steps_done": 4, "steps_total": 14, "tokens_per_s": 1234.5, "loss": 6.25}
    text = steps_text(Event(kind="trial.progress", data=data))
    assert text == "step 4/14, 1,234 tokens/s, loss 6.250"


def test_steps_text_leaves_out_what_is_not_known_yet() -> None:
    assert steps_text(Event(kind="trial.progress", data={"steps_done": 0, "steps_total": None})) == "step 0/?"


def test_an_address_stays_in_one_piece_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=40, color_system=None)
    monkeypatch.setattr(stack_commands, "out", lambda: console)
    link = links.of_ablations(STATE.mlflow_url, "1")
    assert link == f"{STATE.mlflow_url}/#/experiments/1/runs?viewStateShareKey=ablations&workflowType=machine_learning"
    stack_commands.print_stack(StackFiles(home=tmp_path), STATE.model_copy(update={"ablations_url": link}))
    assert f"  MLflow  {link}\n" in output.getvalue()
    assert f"  pages   {STATE.api_url}   sign in: ablate open\n" in output.getvalue()
