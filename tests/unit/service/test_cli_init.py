"""`ablate init`: what it writes is a spec that is accepted as it is, under the name that was asked for."""

import json
import re
import subprocess
from http import HTTPStatus
from pathlib import Path

import pytest
from rich.text import Text
from typer.testing import CliRunner

from ablate.experiments.catalog.files import catalog_names, read_catalog_file
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.spec import ablation_json_schema
from ablate.experiments.errors import SpecError
from ablate.service.cli.output import problem_lines
from ablate.service.cli.service_commands import app
from ablate.service.errors import title_of
from ablate.service.schemas.problems import Problem, ProblemDetail
from tests.factories import on_cpu

FIRST_SPEC = Path(__file__).resolve().parents[3] / "docs/first-spec.md"


def init(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["init", *words])
    return done.exit_code, done.stdout, done.stderr


def test_init_writes_a_spec_that_plans_and_the_schema_that_its_first_line_names(tmp_path: Path) -> None:
    file = tmp_path / "my-question.yaml"
    code, output, _ = init(str(file))
    assert (code, f"ablate run {file}" in output) == (0, True)
    plan = make_plan(on_cpu(file.read_bytes()))
    assert (plan.ablation, [arm.name for arm in plan.arms]) == ("my-question", ["baseline", "chunk-16", "psiv-on"])
    prefix, _, schema = file.read_text().splitlines()[0].partition("$schema=")
    assert prefix == "# yaml-language-server: "
    assert json.loads((tmp_path / schema).read_text()) == ablation_json_schema()


@pytest.mark.parametrize("like", catalog_names())
@pytest.mark.parametrize("stem", ["a", "0x1f", "1e3", "on", "null", "2026-11-22", "x" * 63])
def test_init_changes_nothing_of_a_catalog_spec_but_its_name(tmp_path: Path, like: str, stem: str) -> None:
    file = tmp_path / f"{stem}.yml"
    assert init(str(file), "--like", like)[0] == 0
    made = parse_spec(file.read_bytes(), "application/yaml")
    expected = parse_spec(read_catalog_file(like), "application/yaml")
    assert made == expected.model_copy(update={"ablation": stem})


@pytest.mark.parametrize(
    ("name", "like", "message"),
    [
        ("Question.yaml", "first", "name 'Question' is not allowed"),
        ("question.json", "first", "ends in '.json'; allowed: .yaml, .yml"),
        ("question", "first", "allowed: .yaml, .yml"),
        ("question.yaml", "frist", "did you mean 'first'?"),
        ("nowhere/question.yaml", "first", "No such file or directory"),
    ],
)
def test_init_refuses_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, like: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, problem = init(name, "--like", like)
    assert (code, message in problem) == (5, True), problem
    assert list(tmp_path.iterdir()) == []


def test_init_never_overwrites_a_spec(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    code, _, problem = init(str(file))
    assert (code, "overwrites nothing" in problem, file.read_text()) == (5, True, "mine")
    assert not (tmp_path / "ablation.schema.json").exists()


def test_the_page_quotes_the_refusal_to_which_its_own_commands_lead(tmp_path: Path) -> None:
    page = FIRST_SPEC.read_text(encoding="utf-8")
    broken = re.search(r"^\$ (sed -i .*)$", page, re.MULTILINE)
    assert broken is not None
    file = tmp_path / "my-question.yaml"
    assert init(str(file))[0] == 0
    subprocess.run(["/bin/sh", "-c", broken[1]], cwd=tmp_path, check=True)
    with pytest.raises(SpecError) as refused:
        parse_spec(file.read_bytes(), "application/yaml")
    status = HTTPStatus.UNPROCESSABLE_ENTITY
    problem = Problem(
        title=title_of(status), status=status, errors=tuple(ProblemDetail.of(one) for one in refused.value.problems)
    )
    printed = [Text.from_markup(line).plain for line in problem_lines(problem)]
    quoted = page.partition(f"{printed[0]}\n")[2].partition("\n```")[0].splitlines()
    assert len(quoted) == len(printed) - 1 == 4
    for line, real in zip(quoted, printed[1:], strict=True):
        assert real == line or (line.endswith("...") and real.startswith(line.removesuffix("..."))), (line, real)
