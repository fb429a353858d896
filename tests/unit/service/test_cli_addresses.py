"""Where the embedded stack is: addresses that a narrow terminal does not break in two."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from service.cli import stack_commands
from service.http import mlflow_links
from service.stack.layout import StackFiles
from tests.unit.service.test_stack_layout import STATE


def test_an_address_stays_in_one_piece_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=40, color_system=None)
    monkeypatch.setattr(stack_commands, "out", lambda: console)
    link = mlflow_links.of_ablations(STATE.mlflow_url, "1")
    assert link == f"{STATE.mlflow_url}/#/experiments/1/runs?viewStateShareKey=ablations&workflowType=machine_learning"
    stack_commands.print_stack(StackFiles(home=tmp_path), STATE.model_copy(update={"ablations_url": link}))
    assert f"  MLflow  {link}\n" in output.getvalue()
