"""What `--help` says of a command is about that command, and can be read at 80 columns."""

import re

import pytest
from typer.testing import CliRunner

from ablate.experiments.outcomes import EXIT_CODES, Decision
from ablate.service.cli.commands import plan, report, verdict


def help_text(command: object, *, columns: int = 80) -> str:
    """Return a command's help as one line, without what frames it."""
    result = CliRunner().invoke(command, ["--help"], env={"COLUMNS": str(columns)})  # type: ignore[arg-type]
    assert result.exit_code == 0, result.output
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


@pytest.mark.parametrize("decision", Decision)
def test_the_exit_codes_of_a_verdict_are_said_by_their_decisions(decision: Decision) -> None:
    assert f"{EXIT_CODES[decision].value} {decision}" in help_text(verdict.app)


def test_the_other_exit_codes_of_a_verdict_are_said() -> None:
    text = help_text(verdict.app)
    assert "5 is an error" in text
    assert "or 6 if the others are adopt" in text


def test_a_plan_says_what_it_takes_a_calibration_for() -> None:
    assert "For a bundle" not in help_text(plan.app, columns=140)
    assert "With --out and" in help_text(plan.app, columns=140)
    assert "For a bundle" in help_text(report.app, columns=140)
