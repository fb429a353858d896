"""`--compile-kernels` compiles the kernels of GPU tests once, and fails tests that need a bad kernel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tilelang")

from kernels.mamba3_mimo.cuda.host.compiled import KERNELS, OF_SIZES, pass_configs, program
from kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
from tests.kernels import kernel_tasks
from tests.kernels.budgets import nvcc_release
from tests.kernels.fuzz import planning
from tests.kernels.fuzz.problems import ScanProblem

ROOT = Path(__file__).parents[2]
SMALL = {"N": 16, "P": 32, "R": 2, "cumulated": True, "wanted": (), "switches": {"schedule": "sequential"}}
PLANTED = f"""
import pytest
from tests.kernels.fuzz.problems import ScanProblem
from tests.kernels import kernel_tasks
from tests.kernels.fuzz_answers import NO_TARGET, compiled_decays

kernel_tasks.ANSWER = compiled_decays
right, bad = ScanProblem(H=1, **{SMALL}), ScanProblem(H=NO_TARGET, **{SMALL})

@pytest.mark.scans(right)
def test_right(): pass

@pytest.mark.scans(right.model_copy(update={{"S": 90, "B": 7}}))
def test_of_another_length(): pass

@pytest.mark.scans(right, bad)
def test_bad(): pass

@pytest.mark.scans(right.model_copy(update={{"P": 48}}))
def test_refused(): pass

def test_without_a_scan(): pass
"""


def run_pytest(*arguments, **variables):
    """Return the output of pytest in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "pyproject.toml", *arguments]
    where = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | variables
    return subprocess.run(command, cwd=ROOT, env=where, capture_output=True, text=True, timeout=600, check=False).stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_are_compiled_once_and_only_tests_that_need_a_bad_one_fail(tmp_path):
    if nvcc_release() is None:
        pytest.skip("no nvcc on PATH: kernels cannot be compiled for sm_90a here")
    planted = tmp_path / "test_planted.py"
    planted.write_text(PLANTED)
    options = ("--compile-kernels", "--continue-on-collection-errors", str(tmp_path))
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    text = run_pytest("-p", "tests.kernels.compile_first", *options, TILELANG_CACHE_DIR=str(tmp_path / "cache"))
    assert "2 failed, 3 passed, 1 error" in text, text[-3000:]
    assert "kernels: 1 compiled, 0 kept on disk, 1 failed" in text
    assert "refused: head width is 48" in text
    assert "kernel decays: RuntimeError: nvcc fatal   : Unsupported gpu architecture 'sm_52'" in text
    assert len(list((tmp_path / "cache").rglob("executable.so"))) == 1


def test_nothing_is_compiled_for_tests_that_cannot_be_collected(tmp_path):
    (tmp_path / "test_planted.py").write_text(PLANTED)
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    text = run_pytest("-p", "tests.kernels.compile_first", "--compile-kernels", str(tmp_path))
    assert "1 error" in text
    assert "kernels: " not in text


def test_a_kernel_that_problems_share_is_one_task_and_the_slowest_begin():
    one, longer, other = ScanProblem(S=100), ScanProblem(S=90, B=3), ScanProblem(S=100, switches={"tma": False})
    found = kernel_tasks.tasks([one, longer, other])
    assert set(found) == planning.kernels(one) | planning.kernels(other)
    assert len(found) == len(KERNELS) + len(KERNELS) - len(OF_SIZES)
    assert all(task.key == key for key, task in found.items())
    first, *_, last = [task.kernel for task in found.values()]
    assert first == "gradients"
    assert last not in kernel_tasks.SLOWEST


@pytest.mark.parametrize("name", OF_SIZES)
def test_no_switch_changes_a_kernel_of_sizes_alone(name):
    shape = ScanShape(B=1, S=128, H=2, G=1, N=32, P=32, R=2, A=8, C=16, L=64)
    plain = Variant(fast_math=False)
    others = {"psiv_cache": True, "remat": True, "superchunk": 64, "pipeline_stages": 2, "tma": False, "chunk_size": 8}
    others |= {"warp_specialize": True, "aggressive_smem_merge": True, "layout_2d": False, "heads_in_turn": 2}
    others |= {} if name == "decays" else {"schedule": "sequential"}
    changed = Variant(fast_math=False, **others)
    assert program(name, shape, plain).script() == program(name, shape, changed).script()
    assert pass_configs(name, plain) == pass_configs(name, changed)
    assert set(others) | {"lane", "fast_math"} >= vars(plain).keys() - {"schedule"}
