"""A device is free only when its driver says so."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ablate.workers.devices import node_health
from ablate.workers.devices.inventory import HostProbe
from ablate.workers.devices.node_health import ReleaseProof
from ablate.workers.devices.nvidia_probe import NvidiaProbe
from ablate.workers.errors import DeviceUnknown
from tests.nvidia_gpus import UNKNOWN, FakeGpu, put_driver

MIB = 2**20


class Driver(HostProbe):
    """A driver with the memory and processes of the test."""

    def __init__(self, used: Mapping[int, int], users: tuple[int, ...] = ()) -> None:
        self.used = used
        self.on_device = users
        self.broken: str | None = None

    def memory_used(self) -> Mapping[int, int]:
        if self.broken is not None:
            raise DeviceUnknown(self.broken)
        return self.used

    def users(self) -> tuple[int, ...]:
        return self.on_device


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_health, "_RETRY_S", 0.0)


def test_problem_is_measured_from_the_least_that_was_ever_in_use() -> None:
    driver = Driver({0: 500 * MIB, 1: 4 * MIB})
    proof = ReleaseProof(driver, [0, 1])
    assert proof.problem(patience_s=0) is None
    driver.used = {0: 3 * MIB, 1: 60 * MIB}
    assert proof.problem(patience_s=0) is None
    driver.used = {0: 500 * MIB, 1: 68 * MIB}
    assert proof.problem(patience_s=0) == proof.last == "device 0 still has 497 MiB more in use than when it was free"


def test_problem_a_silent_driver_is_not_free() -> None:
    driver = Driver({0: 4 * MIB})
    proof = ReleaseProof(driver, [0])
    assert proof.problem(patience_s=0) is None
    driver.broken = "nvidia-smi failed: exit 9"
    assert (
        proof.problem(patience_s=0.05)
        == "the driver does not say whether the device is free: nvidia-smi failed: exit 9"
    )
    driver.broken = None
    assert proof.problem(patience_s=0) is proof.last is None


def test_problem_a_device_that_left_the_bus_is_not_free() -> None:
    driver = Driver({1: 4 * MIB})
    assert ReleaseProof(driver, [0, 1]).problem(patience_s=0) == "device 0 is missing; present: [1]"
    driver.used = {}
    assert ReleaseProof(driver, [0]).problem(patience_s=0) == "device 0 is missing; present: none"


def test_problem_names_who_is_on_the_device() -> None:
    proof = ReleaseProof(Driver({0: 4 * MIB}, users=(4712, 4711)), [0])
    assert proof.problem(patience_s=0) == "processes [4711, 4712] are on the device, but no trial runs"


def test_problem_waits_for_the_driver() -> None:
    driver = Driver({0: 4 * MIB}, users=(4711,))
    looks = iter([(4711,), (4711,), ()])
    driver.users = lambda: next(looks)  # type: ignore[method-assign]
    assert ReleaseProof(driver, [0]).problem(patience_s=60) is None


def test_problem_lasts_as_long_as_a_survivor_lives() -> None:
    proof = ReleaseProof(HostProbe())
    survivor = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    proof.survived([survivor.pid])
    assert proof.problem(patience_s=0) == f"processes [{survivor.pid}] survived SIGKILL"
    survivor.kill()
    survivor.wait()
    assert proof.problem(patience_s=0) is None


_GPU = FakeGpu(name="NVIDIA H200", uuid="GPU-1")
_PROCESSES = "ComputeRunningProcesses"


@pytest.mark.parametrize(
    ("gpus", "apps", "error", "expected"),
    [
        ([_GPU], [], 0, None),
        ([_GPU], [(4711, "GPU-1")], 0, "processes [4711] are on the device"),
        ([_GPU], [(0, "GPU-1")], 0, "hides the number of a process"),
        ([replace(_GPU, broken={_PROCESSES: UNKNOWN})], [], 0, "NVIDIA's driver does not answer"),
        ([replace(_GPU, without=frozenset({_PROCESSES}))], [], 0, "does not say which processes"),
        ([_GPU], [], UNKNOWN, "NVIDIA's driver does not answer"),
        ([], [], 0, "device 0 is missing"),
        ([replace(_GPU, broken={"MemoryInfo": UNKNOWN})], [], 0, "NVIDIA's driver does not answer"),
        ([replace(_GPU, without=frozenset({"MemoryInfo"}))], [], 0, None),  # it shares the host's
    ],
    ids=["free", "busy", "hidden", "broken", "unasked", "no answer", "missing", "no memory in use", "shared memory"],
)
def test_nvidia_proof_fails_closed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[FakeGpu],
    apps: list[tuple[int, str]],
    error: int,
    expected: str | None,
) -> None:
    put_driver(tmp_path, monkeypatch, gpus, apps=apps, error=error)
    problem = ReleaseProof(NvidiaProbe(), [0]).problem(patience_s=0)
    assert problem is None if expected is None else expected in str(problem)
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "absent"))
    assert "driver does not answer" in str(ReleaseProof(NvidiaProbe(), [0]).problem(patience_s=0))
