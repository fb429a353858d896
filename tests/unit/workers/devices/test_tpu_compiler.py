import signal
from pathlib import Path

import pytest

from ablate.experiments.outcomes import FailureClass
from ablate.kernels.xla import compiler as xla_compiler
from ablate.kernels.xla.compiler import Order, libtpu_refusal
from ablate.workers.devices import tpu
from ablate.workers.devices.tpu import ask_compiler, find_overflow
from ablate.workers.errors import CompilerFailed, CompilerKilled, DeviceMissing
from ablate.workers.trials.failures import classify

GIB, MIB = 2**30, 2**20

# What libtpu 0.0.24 and 0.0.42.1 wrote when they were given steps that do not fit.
OLD_HBM = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. \
Used 64.00G of 31.25G hbm. Exceeded hbm capacity by 32.75G.

Total hbm usage >= 64.25G:
    reserved        260.00M"""
HBM = """RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (40.00G) exceeds \
available HBM (31.25G)."""
VMEM = """RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:
Ran out of memory in memory space vmem while allocating on stack for %attn.1 = f32[4,8,4096,128]{3,2,1,0:T(8,128)} \
custom-call(%q.1, %k.1, %v.1), custom_call_target="tpu_custom_call". Scoped allocation with size 55.99M and limit \
32.00M exceeded scoped vmem limit by 23.99M. It should not be possible to run out of scoped vmem - """

WHOLE_VMEM = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. \
Used 256.00M of 127.94M vmem. Exceeded vmem capacity by 128.06M."""

SCRATCH = """RESOURCE_EXHAUSTED: Allocation (size=268435456) would exceed memory (size=134217728) :: #allocation2 \
[shape = 'f32[524288,128]{1,0:T(8,128)}', space=vmem, size = 0x10000000, scoped] :: tpu_custom_call.1"""


@pytest.mark.parametrize(
    ("message", "memory", "needed", "available"),
    [
        (OLD_HBM, "hbm", 64 * GIB, round(31.25 * GIB)),
        (HBM, "hbm", 40 * GIB, round(31.25 * GIB)),
        (VMEM, "vmem", round(55.99 * MIB), 32 * MIB),
        (WHOLE_VMEM, "vmem", 256 * MIB, round(127.94 * MIB)),
        (SCRATCH, "vmem", 256 * MIB, 128 * MIB),
    ],
)
def test_a_refusal_for_memory_is_read_with_its_numbers(message: str, memory: str, needed: int, available: int) -> None:
    overflow = find_overflow(message)
    assert overflow is not None
    assert (overflow.memory, overflow.needed_bytes, overflow.available_bytes) == (memory, needed, available)


def test_other_refusals_are_not_taken_for_memory() -> None:
    for message in ("", "INVALID_ARGUMENT: expected <= 7 but got 8", "RESOURCE_EXHAUSTED: too many open files"):
        assert find_overflow(message) is None


def test_a_libtpu_that_cannot_read_the_kernels_is_rejected() -> None:
    for version in ("0.0.20", "0.0.21", "0.0.21.1", "0.0.9"):
        assert f"libtpu is {version}; allowed: 0.0.22 or newer" in str(libtpu_refusal(version))
    for version in ("0.0.22", "0.0.24", "0.0.42.1", "0.1.0", "1.0"):
        assert libtpu_refusal(version) is None


def test_no_libtpu_is_said_with_the_folder_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(xla_compiler.LIBRARY_PATH, "/nowhere/libtpu.so")
    assert xla_compiler.libtpu_version() is None
    assert libtpu_refusal(None) == "no libtpu around /nowhere/libtpu.so"


def test_a_named_libtpu_is_known_by_the_package_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "libtpu-0.0.42.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: libtpu\nVersion: 0.0.42.1\n")
    monkeypatch.setenv(xla_compiler.LIBRARY_PATH, str(tmp_path / "libtpu" / "libtpu.so"))
    assert xla_compiler.libtpu_version() == "0.0.42.1"


def _program(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    """Put another program in the compiler's place: one that ends as libtpu can end a process."""
    (folder / "another_compiler.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(tpu, "_PROGRAM", "another_compiler")


def test_a_compiler_that_aborts_says_its_last_lines_and_is_the_arms_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = 'import os, sys\nprint("F1122 statusor.cc:89 no chip config", file=sys.stderr, flush=True)\nos.abort()\n'
    _program(monkeypatch, tmp_path, body)
    with pytest.raises(CompilerFailed, match=r"process died of SIGABRT; F1122 statusor\.cc:89 no chip") as caught:
        ask_compiler(Order(topology="v6e:1x1"))
    assert classify(caught.value) is FailureClass.USER_ERROR


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_compiler_that_was_killed_is_the_machines_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    _program(monkeypatch, tmp_path, f"import os\nos.kill(os.getpid(), {how.value})\n")
    with pytest.raises(CompilerKilled, match=f"died of {how.name}") as caught:
        ask_compiler(Order(topology="v6e:1x1"))
    assert classify(caught.value) is FailureClass.INFRA_NODE


def test_without_jax_no_compiler_is_found() -> None:
    if xla_compiler.refusal() is None:
        pytest.skip("jax and libtpu are installed here")
    with pytest.raises(DeviceMissing, match=r"not installed|no libtpu"):
        ask_compiler(Order(topology="v6e:1x1"))


def test_the_library_that_jax_names_is_not_taken_for_the_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "libtpu"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    beside = tmp_path / xla_compiler.BESIDE
    beside.parent.mkdir(parents=True)
    beside.touch()
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(xla_compiler.sys, "prefix", str(tmp_path))
    monkeypatch.setenv(xla_compiler.LIBRARY_PATH, str(package / "libtpu.so"))
    assert xla_compiler.library() == beside
    monkeypatch.setenv(xla_compiler.LIBRARY_PATH, "/opt/own/libtpu.so")
    assert xla_compiler.library() == Path("/opt/own/libtpu.so")
