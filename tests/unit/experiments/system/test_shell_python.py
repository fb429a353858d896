"""Which Python a command of the shell starts, against environments as `venv`, conda and uv make them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ablate.experiments.system.shell_python import in_shell_python


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment whose base is a folder of its own, as of pyenv or uv."""
    base = tmp_path / "pythons/3.12/bin"
    prefix = tmp_path / "lab/.venv"
    (prefix / "bin").mkdir(parents=True)
    base.mkdir(parents=True)
    (prefix / "pyvenv.cfg").write_text(f"home = {base}\nversion = 3.12.1\n")
    for name in ("python", "torchrun"):
        (prefix / "bin" / name).touch()
    return prefix


@pytest.mark.parametrize("word", ["python", "torchrun"])
def test_a_name_is_a_program_of_the_active_environment(environment: Path, word: str) -> None:
    variables = {"VIRTUAL_ENV": str(environment), "CONDA_PREFIX": "/elsewhere"}
    found = in_shell_python([word, "train.py"], variables=variables)
    assert found.argv == (str(environment / "bin" / word), "train.py")
    assert found.folders == (str(environment), str(environment.parents[1] / "pythons/3.12"))


def test_a_path_names_its_own_environment(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(environment.parent)
    found = in_shell_python([".venv/bin/python", "train.py"], variables={})
    assert found.argv == (str(environment / "bin/python"), "train.py")


def test_an_environment_of_conda_is_whole(tmp_path: Path) -> None:
    (tmp_path / "conda-meta").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()
    assert in_shell_python(["python"], variables={"CONDA_PREFIX": str(tmp_path)}).folders == (str(tmp_path),)


def test_an_environment_that_venv_makes_of_the_system_needs_no_other_folder(tmp_path: Path) -> None:
    made = subprocess.run(
        ["/usr/bin/python3", "-m", "venv", "--without-pip", str(tmp_path / "env")], check=False, capture_output=True
    )
    if made.returncode:
        pytest.skip("the system's Python makes no environments")
    found = in_shell_python(["python"], variables={"VIRTUAL_ENV": str(tmp_path / "env")})
    assert found.folders == (str(tmp_path / "env"),)


@pytest.mark.parametrize(
    ("project", "layout", "expected"),
    [
        ("lab", "lab/mine", "."),
        ("lab", "lab/src/mine", "src"),
        ("lab/part", "lab/part/mine", "part"),
        ("other", "other/mine", ""),
    ],
)
def test_a_package_that_is_installed_from_the_code_is_imported_from_the_sent_copy(
    environment: Path, project: str, layout: str, expected: str
) -> None:
    root = environment.parents[1]
    (root / layout).mkdir(parents=True)
    info = environment / "lib/python3.12/site-packages/mine-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "direct_url.json").write_text(
        json.dumps({"url": (root / project).as_uri(), "dir_info": {"editable": True}})
    )
    broken = info.with_name("broken-0.1.dist-info")
    broken.mkdir()
    (broken / "direct_url.json").write_text("[]")
    variables = {"VIRTUAL_ENV": str(environment)}
    assert in_shell_python(["python", "train.py"], environment.parent, variables).search_path == expected


@pytest.mark.parametrize(
    ("word", "variables"),
    [
        ("python", {}),
        ("python", {"VIRTUAL_ENV": ""}),
        ("python", {"VIRTUAL_ENV": "/gone"}),
        ("python", {"VIRTUAL_ENV": sys.prefix}),
        (sys.executable, {}),
        ("/usr/bin/env", {}),
        ("./train.sh", {}),
        ("no-such-program", {"VIRTUAL_ENV": "{environment}"}),
    ],
)
def test_any_other_command_stays_as_it_is(environment: Path, word: str, variables: dict[str, str]) -> None:
    values = {name: value.format(environment=environment) for name, value in variables.items()}
    assert in_shell_python([word, "x"], variables=values) == ((word, "x"), (), "")
