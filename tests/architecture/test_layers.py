import subprocess
import sys
from pathlib import Path

import pytest

import kernels
from tests.architecture.pages import ROOT


def test_import_contracts_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_kernels_is_ours_and_not_the_package_of_that_name() -> None:
    assert Path(kernels.__file__ or "").is_relative_to(ROOT)


@pytest.mark.parametrize("module", ["service.app", "service.background", "experiments.runtime.console"])
def test_program_starts_without_heavy_packages(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'jax', 'tilelang', 'mlflow'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_whole_program_lists_its_commands_without_torch() -> None:
    code = (
        "import sys\n"
        "from importlib.metadata import entry_points\n"
        "from experiments.runtime.console import GROUP, build\n"
        "build(entry_points(group=GROUP))\n"
        "print(sorted({'torch', 'jax', 'tilelang', 'mlflow', 'sqlalchemy', 'fastapi'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
