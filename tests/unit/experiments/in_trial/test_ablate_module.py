"""The module that users import: outside of a trial, and on the oldest interpreter that it promises."""

import ast
import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from tests.architecture.pages import ROOT

FILE = ROOT / "experiments/in_trial/ablate.py"


@pytest.fixture
def ablate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("ABLATE_TRIAL", raising=False)
    return load()


def load() -> ModuleType:
    """Import the file anew."""
    spec = importlib.util.spec_from_file_location("ablate_of_users", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OF_TRIALS = {"ablate_imports", "ablate_profile"}
"""Modules that `ablate` imports in trials only."""


@pytest.mark.parametrize("name", ["ablate", "sitecustomize", *sorted(OF_TRIALS)])
def test_it_imports_the_standard_library_only_and_parses_as_python_3_9(name: str) -> None:
    tree = ast.parse(FILE.with_name(f"{name}.py").read_text(encoding="utf-8"), feature_version=(3, 9))
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
    of_its_own = {"transformers", *OF_TRIALS} if name == "ablate" else set()
    assert imports - set(sys.stdlib_module_names) == of_its_own, "transformers: by trainer_callback() alone"
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


NUMBERS = st.integers(0, 9).map(str)
VALUES = st.sampled_from([None, "", "  "]) | NUMBERS
LAUNCHERS = ("OMPI_COMM_WORLD", "PMI", "MV2_COMM_WORLD", "HOROVOD", "SLURM")
NAMES = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
    *(f"{launcher}_{what}" for launcher in LAUNCHERS[:4] for what in ("RANK", "SIZE")),
    *("SLURM_PROCID", "SLURM_NTASKS"),
]


def expected_place(variables: dict[str, str]) -> tuple[int, int]:
    """Return rank and world as the table of the page says, from variables that are not empty."""
    has = {name: int(text) for name, text in variables.items()}
    world = has.get("WORLD_SIZE", has.get("LOCAL_WORLD_SIZE"))
    if "RANK" in has:
        return has["RANK"], world or 1
    if "LOCAL_RANK" in has and world is not None:
        node = has.get("GROUP_RANK", has.get("NODE_RANK", 0))
        return node * has.get("LOCAL_WORLD_SIZE", 0) + has["LOCAL_RANK"], world or 1
    pairs = [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")]
    pairs += [("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"), ("HOROVOD_RANK", "HOROVOD_SIZE")]
    for rank, size in [*pairs, ("SLURM_PROCID", "SLURM_NTASKS")]:
        if rank in has:
            return has[rank], has.get(size) or 1
    return has.get("LOCAL_RANK", 0), world or 1


@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_rank_and_world_of_any_launcher_and_empty_variables(variables: dict[str, str | None]) -> None:
    module = load()
    texts = {name: text for name, text in variables.items() if text is not None}
    with pytest.MonkeyPatch.context() as patch:
        for name in NAMES:
            patch.delenv(name, raising=False)
        for name, text in texts.items():
            patch.setenv(name, text)
        assert module._place() == expected_place({name: text for name, text in texts.items() if text.strip()})


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "RANK": ""}, (1, 2)),
        ({"LOCAL_RANK": "1", "GROUP_RANK": "2", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "12"}, (9, 12)),
        ({"RANK": "", "WORLD_SIZE": "", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (3, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (0, 1)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
        ({}, (0, 1)),
    ],
)
def test_the_place_under_each_launcher(
    ablate: ModuleType, variables: dict[str, str], place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert ablate._place() == place


def test_a_process_group_of_torch_knows_the_place_best(ablate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    group = ModuleType("torch.distributed")
    values = {"is_available": True, "is_initialized": True, "get_rank": 3, "get_world_size": 4}
    for name, value in values.items():
        setattr(group, name, lambda value=value: value)
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    monkeypatch.setenv("RANK", "0")
    assert ablate._place() == (3, 4)


@pytest.mark.parametrize("text", ["x", "-1", "1.0", "\u0661"])
def test_a_rank_that_is_no_number_is_named(ablate: ModuleType, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", text)
    with pytest.raises(ValueError, match="variable RANK is"):
        ablate._place()
    assert not ablate.trial().active, "outside of a trial nobody asks"


@pytest.mark.parametrize("name", ["", "a" * 64, "two\nlines", "\ud800", 3, None])
def test_a_bad_name_of_a_code_path_is_refused_where_it_runs(ablate: ModuleType, name: object) -> None:
    with pytest.raises(ValueError, match="allowed: 1 to 63 printable letters"):
        ablate.live(name)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_code_path_in_a_compiled_function_is_live_once_compiled_and_breaks_no_graph(
    ablate: ModuleType, backend: str
) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 2:
            ablate.live("large")
            return x.sum()
        ablate.live("small")
        return x.mean()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    results = [float(compiled(torch.ones(4))) for _ in range(3)]
    assert (results, ablate._live, counter.frame_count) == ([4.0] * 3, {"large"}, 1)
    assert float(compiled(torch.ones(1))) == 1.0
    assert (ablate._live, counter.frame_count) == ({"large", "small"}, 2)
