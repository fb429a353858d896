"""Advice for programs that fail because of their place: real interpreters, real isolation."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ablate.workers.commands.advice import ProgramPlace
from ablate.workers.commands.code_copy import copy_code
from ablate.workers.isolation.reach import isolation_problem
from tests.programs import LOOP, order_for, program_config, ran, run_trial, write_program

isolates = pytest.mark.skipif(isolation_problem() is not None, reason="this kernel isolates no trials")


def message_of(code: Path, home: Path, **changes: Any) -> str:
    result = ran(program_config(code, **changes), home)
    return str(result.message)


@pytest.mark.parametrize("place", ["ablate.py", "ablate/__init__.py"])
@pytest.mark.parametrize("script", ["train.py", "scripts/train.py"])
def test_a_file_that_hides_the_module_is_named(tmp_path: Path, place: str, script: str) -> None:
    folder = (tmp_path / "code" / script).parent
    write_program(folder)
    folder.joinpath(place).parent.mkdir(exist_ok=True)
    folder.joinpath(place).write_text("print('my own')")
    shown = folder.joinpath(place).relative_to(tmp_path / "code")
    message = message_of(tmp_path / "code", tmp_path / "home", command=("python", script, "--seed", "{seed}"))
    assert "AttributeError: module 'ablate' has no attribute 'trial'" in message
    assert f"the file {shown} of the sent code hides Ablate's module 'ablate'" in message
    assert "rename it" in message


def test_a_script_of_the_name_ablate_that_does_its_own_work_is_named(tmp_path: Path) -> None:
    write_program(tmp_path / "code", "import ablate")
    tmp_path.joinpath("code/ablate.py").write_text("print('runs everything')")
    assert "the file ablate.py of the sent code" in message_of(tmp_path / "code", tmp_path / "home")


@isolates
@pytest.mark.parametrize("name", ["json", "socket", "typing", "pathlib", "random", "enum"])
def test_a_file_that_hides_a_standard_module_is_named(tmp_path: Path, name: str) -> None:
    """The environment is a plain one: that of these tests has imported most of them before the program begins."""
    write_program(tmp_path / "code").joinpath(f"{name}.py").write_text("MINE = 1")
    message = isolated_message(tmp_path, "import random\nrandom.Random(1)\n" + LOOP, environment(tmp_path)[0])
    assert f"the file {name}.py of the sent code hides Python's own module '{name}': rename it" in message


@pytest.mark.parametrize("name", ["platform", "time", "sys", "hashlib", "tests", "utils", "train_types"])
def test_files_that_hide_nothing_that_a_trial_needs_do_no_harm(tmp_path: Path, name: str) -> None:
    write_program(tmp_path / "code")
    tmp_path.joinpath("code", f"{name}.py").write_text("MINE = 1")
    result = ran(program_config(tmp_path / "code"), tmp_path / "home")
    assert result.failure_class is None, result.message


def test_a_file_of_a_standard_name_that_has_no_part_in_a_failure_is_not_named(tmp_path: Path) -> None:
    write_program(tmp_path / "code", "raise ValueError('module with types')")
    tmp_path.joinpath("code/lab").mkdir()
    for name in ("types.py", "lab/json.py", "ablate.txt"):
        tmp_path.joinpath("code", name).write_text("MINE = 1")
    assert "hides" not in message_of(tmp_path / "code", tmp_path / "home")


@pytest.mark.parametrize("layout", ["src", "."])
def test_a_module_of_the_sent_code_that_is_not_on_the_search_path_is_named(tmp_path: Path, layout: str) -> None:
    write_program(tmp_path / "code/scripts", "import mylib")
    tmp_path.joinpath("code", layout, "mylib").mkdir(parents=True)
    tmp_path.joinpath("code", layout, "mylib/__init__.py").touch()
    message = message_of(tmp_path / "code", tmp_path / "home", command=("python", "scripts/train.py"))
    assert f"write workload.env: {{PYTHONPATH: {layout}}}" in message


def isolated_message(tmp_path: Path, source: str, prefix: Path | None = None, **changes: Any) -> str:
    """Run the program as a worker that isolates it, with its state folder hidden; return why it failed."""
    home = tmp_path / "home"
    config = program_config(write_program(tmp_path / "code", source), **changes)
    order = order_for(config, home)
    order = replace(order, dataset=copy_code(order).data_folder, program_prefix=prefix).isolated((home / "keys",))
    result = run_trial(order)
    assert result is not None, order.paths.log.read_text()
    return str(result.message)


def environment(folder: Path, *, linked: bool = False) -> tuple[Path, Path]:
    """Make a Python environment with this interpreter; return it, or a link to it, and its packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "real")], check=True)
    folder.joinpath("link").symlink_to(folder / "real")
    [site] = folder.glob("real/lib/python3*/site-packages")
    return folder / ("link" if linked else "real"), site


@isolates
@pytest.mark.parametrize("kind", ["pth", "linked", "finder", "direct_url", "PYTHONPATH"])
def test_a_module_in_a_folder_that_is_closed_to_trials_is_named_with_the_setting(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "a project/src"
    source.joinpath("mylib").mkdir(parents=True)
    source.joinpath("mylib/__init__.py").touch()
    prefix, site = environment(tmp_path, linked=kind == "linked")
    changes: dict[str, Any] = {}
    if kind in {"pth", "linked"}:
        site.joinpath("_editable_impl_mylib.pth").write_text(f"{source}\n")
    elif kind == "finder":
        site.joinpath("__editable___mylib_0_1_finder.py").write_text(
            f"MAPPING: dict[str, str] = {{'mylib': {str(source / 'mylib')!r}}}\nNAMESPACES = {{}}\n"
        )
    elif kind == "direct_url":
        site.joinpath("mylib-0.1.dist-info").mkdir()
        values = {"url": source.parent.as_uri(), "dir_info": {"editable": True}}
        site.joinpath("mylib-0.1.dist-info/direct_url.json").write_text(json.dumps(values))
    else:
        changes["env"] = {"PYTHONPATH": str(source)}
    message = isolated_message(tmp_path, "import mylib", prefix, **changes)
    assert "No module named 'mylib'; 'mylib' lies in" in message
    assert f"write workload.data: [{source}]" in message


@isolates
def test_a_module_that_only_the_users_python_has_is_said_to_be_missing_in_ours(tmp_path: Path) -> None:
    message = isolated_message(tmp_path, "import no_such_lab")
    assert f"the program ran in Ablate's own Python ({sys.prefix}): activate the program's" in message
    prefix, _site = environment(tmp_path)
    assert "Ablate's own Python" not in isolated_message(tmp_path, "import no_such_lab", prefix)


@isolates
@pytest.mark.parametrize(("layout", "root"), [("lib/mine", "lib"), ("src/mine", "src")])
def test_a_package_that_is_installed_from_the_code_is_imported_from_the_sent_copy(
    tmp_path: Path, layout: str, root: str
) -> None:
    prefix, site = environment(tmp_path)
    for folder in (tmp_path / "origin", tmp_path / "code"):
        folder.joinpath(layout).mkdir(parents=True)
        folder.joinpath(layout, "__init__.py").write_text("")
    mapping = {"mine": str(tmp_path / "origin" / layout)}
    site.joinpath("__editable___mine_0_1_finder.py").write_text(
        f"import sys\nfrom importlib.util import spec_from_file_location\nMAPPING = {mapping!r}\n"
        "class Finder:\n    @staticmethod\n    def find_spec(name, path=None, target=None):\n"
        "        if name in MAPPING:\n"
        "            return spec_from_file_location(name, MAPPING[name] + '/__init__.py')\n"
        "def install():\n    sys.meta_path.append(Finder)\n"
    )
    site.joinpath("__editable__.mine.pth").write_text(
        "import __editable___mine_0_1_finder; __editable___mine_0_1_finder.install()\n"
    )
    message = isolated_message(tmp_path, "import mine", prefix)
    assert f"and not its sent copy: write workload.env: {{PYTHONPATH: {root}}}" in message


@isolates
def test_a_file_that_is_closed_to_trials_is_named_with_the_setting(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.joinpath("train.bin").write_text("x")
    message = isolated_message(tmp_path, f"open({str(data / 'train.bin')!r})")
    assert f"the file is in {data}, which is closed to trials" in message
    assert message.endswith(f"write workload.data: [{data}]")


@isolates
@pytest.mark.parametrize(
    ("source", "name", "entry"),
    [
        ("open('data.bin')", "data.bin", "data.bin"),
        ("open('data/wiki/train.bin')", "data/wiki/train.bin", "data/wiki/"),
        ("import os; open(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'a/x.bin'))", "a/x.bin", "a/"),
        ("from pathlib import Path; (Path(__file__).resolve().parent / 'x.bin').read_bytes()", "x.bin", "x.bin"),
        ("open(b'a b.bin')", "a b.bin", "a b.bin"),
        ("import subprocess; subprocess.run(['cat', 'd/x.bin'], check=True)", "d/x.bin", "d/"),
        ("raise FileNotFoundError('No such file or directory: weights.safetensors')", "weights.safetensors", None),
        (
            "raise OSError(\"Unable to open file (unable to open file: name = 'x/t.h5', errno = 2, error\")",
            "x/t.h5",
            None,
        ),
    ],
)
def test_a_file_that_was_not_sent_is_named_with_the_line_that_opens_it(
    tmp_path: Path, source: str, name: str, entry: str | None
) -> None:
    message = isolated_message(tmp_path, source)
    if "subprocess" in source:
        assert "CalledProcessError" in message
        return
    assert f"the sent code has no {name}, and files that git ignores are not sent" in message
    option = f"type --data {shlex.quote(entry or '')} before the `--`"
    assert entry is None or message.endswith(f"where it is, {option}, or write workload.data: [{entry}]")


@isolates
@pytest.mark.parametrize("source", ["open('train.py/x')", "open('../x.bin')", "open('/srv/none/x.bin')", "1 / 0"])
def test_other_missing_files_get_no_advice(tmp_path: Path, source: str) -> None:
    assert "workload.data" not in isolated_message(tmp_path, source)


@isolates
def test_a_command_that_is_closed_to_trials_is_named_with_the_setting(tmp_path: Path) -> None:
    tool = tmp_path / "bin/tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert f"write workload.data: [{tool.parent}]" in isolated_message(tmp_path, "", command=(str(tool),))


@isolates
def test_the_state_folder_is_never_offered(tmp_path: Path) -> None:
    keys = tmp_path / "home/keys"
    keys.mkdir(parents=True)
    keys.joinpath("data.bin").write_text("x")
    message = isolated_message(tmp_path, f"open({str(keys / 'data.bin')!r})")
    assert "which stays closed to trials" in message
    assert "READABLE" not in message


@isolates
def test_a_file_that_a_trial_may_not_write_is_named(tmp_path: Path) -> None:
    message = isolated_message(tmp_path, "open('/usr/lib/of-a-trial', 'w')")
    assert "a trial may write only below its own folder" in message


def test_a_denied_file_that_its_mode_closes_is_no_matter_of_isolation(tmp_path: Path) -> None:
    place = ProgramPlace(argv=("x",), code=None, prefix=tmp_path, search_path="", writable=tmp_path)
    denied = "PermissionError: [Errno 13] Permission denied: '/nowhere/at/all'"
    assert place.advised(denied) == denied
