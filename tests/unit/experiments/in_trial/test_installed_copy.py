"""Modules that a program imports from outside of its sent code: which of them measure nothing, and which are right."""

import importlib.machinery
import random
import sys
import types
from pathlib import Path

import pytest

from ablate.experiments.in_trial.ablate_imports import installed_copy

TEXT = "\n".join(f"line_{number} = {number}" for number in range(20))


class Places:
    """A folder of sent code, an environment and a work tree; modules are imported without running them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code, self.site = folder / "trial/code", folder / "env/lib/python3.12/site-packages"
        self.original = folder / "home/me/project"
        self.code.mkdir(parents=True)
        self._patch = monkeypatch
        monkeypatch.setattr(sys, "path", [str(self.code)])
        for name in [name for name in sys.modules if name.partition(".")[0] in {"mylib", "utils", "acme", "datasets"}]:
            monkeypatch.delitem(sys.modules, name)

    def search(self, *folders: Path | str) -> None:
        self._patch.setattr(sys, "path", [str(folder) for folder in folders])

    def write(self, *files: Path, text: str = TEXT) -> None:
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def imported(self, name: str, file: Path | None, *, path: Path | None = None) -> None:
        module = types.ModuleType(name)
        if file is not None:
            module.__file__ = str(file)
        if path is not None:
            module.__path__ = [str(path)]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self._patch.setitem(sys.modules, name, module)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    return Places(tmp_path, monkeypatch)


def test_an_installed_copy_of_a_src_layout_is_named_with_both_paths(places: Places) -> None:
    places.write(places.code / "src/mylib/__init__.py", text="STEP = 0.020")
    places.write(places.site / "mylib/__init__.py", text="STEP = 0.010")
    places.imported("mylib", places.site / "mylib/__init__.py")
    sentence = str(installed_copy(places.code))
    assert (
        f"imported 'mylib' from {places.site}/mylib, and not from the sent code, which has it in src/mylib" in sentence
    )
    assert "workload.env: {PYTHONPATH: src}" in sentence


def test_a_flat_layout_beside_a_folder_of_scripts_is_named(places: Places) -> None:
    places.search(places.code / "scripts", places.site)
    places.write(*(root / "mylib" / name for root in (places.code, places.site) for name in ("__init__.py", "a.py")))
    places.write(places.code / "mylib/new.py")
    places.imported("mylib", places.site / "mylib/__init__.py")
    assert "{PYTHONPATH: .}" in str(installed_copy(places.code))


@pytest.mark.parametrize("layout", ["src", "python", "packages/core/src", "."])
def test_an_editable_installation_of_the_original_folder_is_named(places: Places, layout: str) -> None:
    places.search(places.code / "scripts", places.site)
    for root in (places.code, places.original):
        places.write(root / layout / "mylib/__init__.py", root / layout / "mylib/model.py")
    places.imported("mylib", places.original / layout / "mylib/__init__.py")
    assert f"PYTHONPATH: {layout}}}" in str(installed_copy(places.code))


def test_a_search_path_whose_later_folder_has_the_sent_module_is_named_without_that_advice(places: Places) -> None:
    places.search(places.code, places.site, places.code / "lib")
    places.write(places.code / "lib/mylib.py", text="A = 1")
    places.write(places.site / "mylib/__init__.py")
    places.imported("mylib", places.site / "mylib/__init__.py")
    sentence = str(installed_copy(places.code))
    assert "lib/mylib.py" in sentence
    assert "PYTHONPATH" not in sentence


def test_a_package_without_init_and_a_namespace_are_followed_to_their_parts(places: Places) -> None:
    places.write(places.code / "src/acme/train/__init__.py", places.site / "acme/train/__init__.py", text="")
    places.imported("acme", None, path=places.site / "acme")
    places.imported("acme.train", places.site / "acme/train/__init__.py")
    assert "src/acme/train" in str(installed_copy(places.code))


def test_a_script_of_the_original_folder_is_named(places: Places) -> None:
    places.write(places.code / "train.py", places.original / "train.py")
    places.imported("__main__", places.original / "train.py")
    assert f"ran from {places.original}/train.py" in str(installed_copy(places.code))


def test_other_modules_of_the_same_name_are_no_copies(places: Places) -> None:
    places.search(places.code / "scripts", places.site)
    places.write(places.code / "scripts/train.py", places.code / "tests/__init__.py", places.code / "setup.py")
    places.write(places.code / "lab/utils.py", places.code / "lab/types.py", places.code / "models/mylib/__init__.py")
    places.write(places.code / "src/datasets/__init__.py", places.code / "src/datasets/mine.py")
    places.write(places.code / "src/utils.py", text="\n".join(f"other_{number} = 1" for number in range(30)))
    places.write(*(places.site / f"datasets/part_{number}.py" for number in range(20)), places.site / "utils.py")
    places.write(places.site / "datasets/__init__.py", places.site / "mylib/__init__.py", places.site / "mylib/a.py")
    for name in ("datasets", "mylib"):
        places.imported(name, places.site / name / "__init__.py")
    places.imported("utils", places.site / "utils.py")
    assert installed_copy(places.code) is None


def test_modules_of_the_code_itself_of_python_and_folders_of_data_are_no_copies(places: Places) -> None:
    places.write(places.code / "mylib/__init__.py", places.code / "types.py", places.code / "json/__init__.py")
    places.write(places.code / "datasets/load.py", places.site / "datasets/__init__.py")
    places.imported("mylib", places.code / "mylib/__init__.py")
    places.imported("datasets", places.site / "datasets/__init__.py")
    places.imported("utils", places.site / "utils.cpython-312-x86_64-linux-gnu.so")
    places.write(places.code / "utils.py")
    assert installed_copy(places.code) is None


def test_drawn_layouts_are_named_exactly_if_the_sent_module_lost(places: Places) -> None:
    """The oracle knows which root wins, because it puts the copy there."""
    draw = random.Random(44)  # noqa: S311 - a drawn test
    for number in range(100):
        code = places.code.parent / f"code-{number}"
        root = draw.choice(["", "src", "lib/python"])
        files = [f"mylib/{name}.py" for name in ("__init__", *(f"m{i}" for i in range(draw.randrange(1, 6))))]
        places.write(*(code / root / file for file in files))
        outside = draw.choice([places.site / str(number), places.original / str(number) / root])
        lost, searched = draw.random() < 0.5, draw.random() < 0.5
        copy = outside if lost else code / root
        places.write(*(copy / file for file in files))
        places.search(code / "scripts", outside, *([code / root] if searched else []))
        places.imported("mylib", copy / "mylib/__init__.py")
        seen = lost and (searched or root != "lib/python" or outside.is_relative_to(places.original))
        assert (installed_copy(code) is not None) is seen, (number, root, outside, lost, searched)
