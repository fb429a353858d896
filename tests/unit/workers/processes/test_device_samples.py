"""Samples of a command's GPUs, with a driver's library that answers from a list."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ablate.workers.commands import device_samples
from ablate.workers.commands.device_samples import DeviceSamples
from ablate.workers.errors import DeviceUnknown

UUIDS = ("GPU-5a1c0000-aaaa", "GPU-5a1d0000-bbbb", "GPU-6b2e0000-cccc")


class Driver:
    """Clocks and processes of three GPUs, which a test changes."""

    def __init__(self) -> None:
        self.clocks = [1980, 1980, 1980]
        self.processes: list[dict[int, int | None]] = [{}, {}, {}]
        self.asked: set[int] = set()

    def module(self) -> ModuleType:
        module = ModuleType("pynvml")
        values: dict[str, Any] = {
            "NVMLError": RuntimeError,
            "NVML_CLOCK_SM": 1,
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: len(UUIDS),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda handle: UUIDS[handle],
            "nvmlDeviceGetClockInfo": self.clock,
            "nvmlDeviceGetComputeRunningProcesses": self.rows,
        }
        module.__dict__.update(values)
        return module

    def clock(self, handle: int, _kind: int) -> int:
        self.asked.add(handle)
        return self.clocks[handle]

    def rows(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.processes[handle].items()]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver.module())
    monkeypatch.setattr(device_samples, "find_spec", lambda _name: True)
    monkeypatch.setattr(device_samples, "CLOCK_EVERY_S", 0.0)
    monkeypatch.setattr(device_samples, "MEMORY_EVERY_S", 0.0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return driver


@pytest.fixture
def ranks() -> Iterator[tuple[int, int]]:
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield processes[0].pid, processes[1].pid
    for process in processes:
        process.kill()
        process.wait()


def test_the_peak_is_the_greatest_sum_of_the_trials_processes_on_one_gpu(
    driver: Driver, ranks: tuple[int, int]
) -> None:
    """Drawn tables against a plain loop; a process of another program does not count."""
    chance = random.Random(20261126)  # noqa: S311
    samples, expected = DeviceSamples(2), 0
    for _ in range(200):
        driver.processes = [
            {pid: chance.choice([None, chance.randrange(2**36)]) for pid in chance.sample([*ranks, os.getppid(), 1], 3)}
            for _ in UUIDS
        ]
        samples.sample()
        for table in driver.processes[:2]:  # the trial has two of the three GPUs
            expected = max(expected, sum(size or 0 for pid, size in table.items() if pid in ranks))
    assert samples.peak_bytes == expected > 0


def test_no_process_of_the_trial_on_a_gpu_is_no_peak(driver: Driver) -> None:
    samples = DeviceSamples(3)
    driver.processes = [{1: 2**30}, {}, {os.getppid(): 5}]
    samples.sample()
    assert samples.peak_bytes is None


def test_the_clock_is_that_of_the_slowest_held_gpu(driver: Driver) -> None:
    samples = DeviceSamples(2)
    driver.clocks = [1980, 1410, 300]
    samples.sample()
    assert samples.clock_at(0.0) == 1410.0
    assert driver.asked == {0, 1}


@pytest.mark.parametrize(("visible", "asked"), [("2,0", {2, 0}), (f"{UUIDS[1]},2", {1, 2}), ("GPU-6b2e,0,1", {2, 0})])
def test_gpus_are_those_that_the_variable_names_first(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, visible: str, asked: set[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    DeviceSamples(2).sample()
    assert driver.asked == asked


@pytest.mark.parametrize(
    ("visible", "words"), [("0,7", "names '7'"), ("GPU-5a", "names 'GPU-5a'"), ("1", "this worker has 1")]
)
def test_a_gpu_that_the_driver_does_not_know_is_refused(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, visible: str, words: str
) -> None:
    del driver
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(DeviceUnknown, match=words):
        DeviceSamples(2)


def test_without_gpus_or_the_package_there_are_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_samples, "find_spec", lambda _name: None)
    for samples in (DeviceSamples(0), DeviceSamples(2)):
        samples.sample()
        assert (samples.clock_at(1.0), samples.peak_bytes) == (None, None)
