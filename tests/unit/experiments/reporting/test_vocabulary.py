"""One word per state: in the terminal, on pages, in pull requests, in MLflow, in the REST interface and in the docs."""

import ast
import dataclasses
import io
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from ablate.experiments.analysis.verdicts import Cause
from ablate.experiments.outcomes import BlockState, Decision, Outcome, TrialState, VerdictWord
from ablate.experiments.records.circumstances import AttemptRecord, Circumstances
from ablate.experiments.reporting.mlflow.parent import parent
from ablate.experiments.reporting.pages.report import render
from ablate.experiments.reporting.terminal.markdown import pull_request_markdown
from ablate.experiments.reporting.verdict_cells import WORDS
from ablate.experiments.reporting.view import AblationView
from ablate.service.cli import verdict_tables
from ablate.service.web import grid
from tests import views
from tests.architecture.pages import ROOT

SAID_OTHERWISE: dict[str, str] = {
    "uncalibrated": r"not calibrated|\bprovisional\b|\bare capped|\badmit(s|ted)?\b|other than inconclusive|"
    r"only inconclusive|words? (none )?beyond",
    "samples say": r"samples alone",
    "broken attempt": r"attempts? did not count|discarded attempt|no attempt broke",
    "asking N of this question": r"question was asked|asked \d+ times",
    "false verdict": r"false words?\b",
    "lower, higher": r"\b(less|more) (peak|throughput|memory) .*\bby\b",
    "queued": r"\bpending\b",
    "timeout": r"\btimed out\b",
    "stopped early": r"before all were seen",
}
"""The word of a state -> other ways to say it, which nobody reads anywhere."""
OF_OTHERS = {
    ("service/cli/slurm.py", "PENDING"),
    ("service/cli/commits/forges.py", "pending"),
    ("docs/ci.md", "pending"),
}
"""Words of other programs."""
SHOWN = (
    "experiments/reporting",
    "experiments/analysis",
    "service/web",
    "service/cli",
    "service/schemas",
    "service/routes",
)
"""Folders whose texts people read."""


def literals(path: Path) -> Iterator[str]:
    """Yield the texts of a Python file, without its documentation; parts of one f-string as one text."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | documentation:
            yield node.value


@cache
def texts() -> dict[str, list[str]]:
    """Return the texts that people read by file: of programs, templates, scripts, the interface and the docs."""
    by_file = {
        path.relative_to(ROOT).as_posix(): list(literals(path))
        for folder in SHOWN
        for path in (ROOT / folder).rglob("*.py")
    }
    for pattern in ("experiments/**/*.html", "service/**/*.html", "service/**/*.js", "docs/*.md", "README.md"):
        by_file |= {
            path.relative_to(ROOT).as_posix(): [path.read_text(encoding="utf-8")] for path in ROOT.glob(pattern)
        }
    by_file["tests/golden/openapi.json"] = [(ROOT / "tests/golden/openapi.json").read_text(encoding="utf-8")]
    return by_file


@pytest.mark.parametrize("word", SAID_OTHERWISE)
def test_no_text_has_another_word_for_a_state(word: str) -> None:
    other = re.compile(SAID_OTHERWISE[word], re.IGNORECASE)
    places = [
        (name, match[0])
        for name, every in texts().items()
        for text in every
        for match in [other.search(text)]
        if match and (name, match[0]) not in OF_OTHERS
    ]
    assert places == [], f"write '{word}'"


def media(view: AblationView) -> dict[str, str]:
    """Return the whole answer in each medium."""
    assert view.verdict is not None
    console = Console(width=200, file=io.StringIO(), force_terminal=False)
    console.print(verdict_tables.verdict(view.verdict))
    for line in verdict_tables.explanation(view.verdict):
        console.print(line)
    run = parent(view, "")
    return {
        "terminal": console.file.getvalue(),  # type: ignore[attr-defined]
        "page": render(view),
        "pull request": pull_request_markdown(view.verdict),
        "MLflow": "\n".join([*run.tags.values(), *run.tags]),
    }


def test_each_medium_says_a_state_in_its_word() -> None:
    view = views.view(num_blocks=6, timed=4)
    assert view.verdict is not None
    known = Circumstances(
        attempts=(
            AttemptRecord(
                block_index=0,
                number=1,
                failure_class="preempted",
                arm=None,
                message="wanted elsewhere",
                node="n",
                vanished=False,
            ),
        )
    )
    verdict = view.verdict.model_copy(
        update={
            "circumstances": known,
            "variants": tuple(
                one.model_copy(update={"verdict": VerdictWord.INCONCLUSIVE, "cause": Cause.UNCALIBRATED})
                if one.primary
                else one
                for one in view.verdict.variants
            ),
        }
    )
    changed = dataclasses.replace(view, verdict=verdict)
    for medium, text in media(changed).items():
        assert "uncalibrated" in text.lower(), medium
        assert "broken attempt" in text.lower().replace("broken_attempt", "broken attempt"), medium
        for word, other in SAID_OTHERWISE.items():
            assert not re.search(other, re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL), re.IGNORECASE), (
                medium,
                word,
            )


def test_tables_have_the_words_of_the_interface() -> None:
    of_pages = {"ran", "not planned"}
    states = {str(word) for words in (TrialState, BlockState, Outcome) for word in words}
    cells = {*grid.STATES.values(), grid._HAS_RUN, grid._NOTHING}
    assert {cell.word for cell in cells} - of_pages <= states
    assert all(cell.word == str(state) for state, cell in grid.STATES.items())
    assert {str(word) for word in WORDS} == {str(word) for word in VerdictWord}
    assert len({str(word) for words in (VerdictWord, Decision) for word in words}) == len({*VerdictWord, *Decision})
