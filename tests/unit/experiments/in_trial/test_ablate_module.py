"""The module that users import: outside of a trial, and on the oldest interpreter that it promises."""

import ast
import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.architecture.pages import ROOT

FILE = ROOT / "experiments/in_trial/ablate.py"


@pytest.fixture
def ablate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("ABLATE_TRIAL", raising=False)
    spec = importlib.util.spec_from_file_location("ablate_of_users", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_imports_the_standard_library_only_and_parses_as_python_3_9() -> None:
    tree = ast.parse(FILE.read_text(encoding="utf-8"), feature_version=(3, 9))
    imports = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imports - set(sys.stdlib_module_names) == {"transformers"}, "imported by trainer_callback() alone"
    unions = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)]
    assert unions == [], "X | None is a syntax of Python 3.10 at run time"


def test_outside_of_a_trial_nothing_is_measured(ablate: ModuleType, tmp_path: Path) -> None:
    with ablate.trial(seed=3) as trial:
        assert not trial.active
        assert trial.seed == 0
        assert trial.out == Path.cwd()
        seen = []
        for step in trial.steps(4):
            step.report(loss=1.0, tokens=5)
            seen.append(step.index)
        trial.report(val_bpb=1.0)
    assert seen == [0, 1, 2, 3]
    assert [step.index for step in itertools.islice(ablate.trial().steps(), 3)] == [0, 1, 2]


@pytest.mark.parametrize("tokens", [-1, 1.5, True, "many"])
def test_impossible_tokens_are_refused_where_they_are_reported(ablate: ModuleType, tokens: object) -> None:
    step = next(iter(ablate.trial().steps(1)))
    with pytest.raises((TypeError, ValueError)):
        step.report(tokens=tokens)
