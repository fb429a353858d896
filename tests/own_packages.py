"""Recipe packages that tests write, install for this process, and run."""

import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.design import packages

DECLARATION = {
    "version": 1,
    "summary": "A loop that sleeps.",
    "train": "{package}.training:train",
    "config": {"width": 8, "rate": 0.5, "kind": "a", "fast": False},
    "gates": {
        "kind": {
            "question": "Is b faster?",
            "values": ["a", "b"],
            "claim": "changes-model",
            "proof": "the program says so",
            "blind_to": "lies",
        },
        "fast": {
            "question": "Is it faster?",
            "values": [False, True],
            "claim": "schedule-only",
            "proof": "the program says so",
            "blind_to": "lies",
        },
    },
    "overrides": {
        "width": {"description": "width", "minimum": 4, "maximum": 64},
        "rate": {"description": "rate", "minimum": 0.0, "maximum": 1.0},
    },
}
TRAINING = """
def train(trial, config):
    for step in trial.steps():
        step.report(loss=1.0 + trial.seed, tokens=config["width"])
    trial.attest(kind=config["kind"], fast=config["fast"])
"""


def write_package(folder: Path, name: str, declaration: str, training: str = TRAINING) -> EntryPoint:
    package = folder / name
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text("")
    package.joinpath("declaration.py").write_text(declaration)
    package.joinpath("training.py").write_text(training)
    return EntryPoint(name=name.replace("_", "-"), value=f"{name}.declaration:RECIPE", group=packages.GROUP)


def declared(name: str, functions: str = "", **changes: Any) -> str:
    """Return the source of a declaration; `functions` is code after it."""
    values = {**DECLARATION, "train": f"{name}.training:train", **changes}
    return f"RECIPE = {values!r}\n{functions}\n"


class OwnPackages:
    """Packages in a folder that this process can import, with the recipes that they declare."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self.points: list[EntryPoint] = []
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setattr(packages, "entry_points", lambda group: self.points)
        packages.installed.cache_clear()

    def add(self, name: str, declaration: str | None = None, training: str = TRAINING) -> Path:
        source = declared(name) if declaration is None else declaration
        self.points.append(write_package(self._folder, name, source, training))
        importlib.invalidate_caches()
        packages.installed.cache_clear()
        return self._folder / name

    def forget(self) -> None:
        packages.installed.cache_clear()
        own = {point.value.partition(".")[0] for point in self.points}
        for module in [module for module in sys.modules if module.partition(".")[0] in own]:
            del sys.modules[module]


@pytest.fixture
def own_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnPackages]:
    folder = tmp_path / "site"
    folder.mkdir()
    made = OwnPackages(folder, monkeypatch)
    yield made
    monkeypatch.undo()
    made.forget()
