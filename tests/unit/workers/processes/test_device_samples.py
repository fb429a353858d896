"""Samples of a command's GPUs, with a driver's library that answers from a list."""

import os
import random
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from ablate.workers.commands import device_samples
from ablate.workers.commands.device_samples import DeviceSamples
from ablate.workers.errors import DeviceUnknown
from tests.nvidia_gpus import FakeGpu, put_driver

UUIDS = ("GPU-5a1c0000-aaaa", "GPU-5a1d0000-bbbb", "GPU-6b2e0000-cccc")


class Driver:
    """Clocks and processes of three GPUs, which a test changes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch
        self.put()

    def put(
        self, clocks: Sequence[int] = (1980, 1980, 1980), processes: Sequence[Mapping[int, int | None]] = ()
    ) -> None:
        gpus = [FakeGpu(name="NVIDIA L4", uuid=uuid, clock=clock) for uuid, clock in zip(UUIDS, clocks, strict=True)]
        apps = [(pid, uuid, size) for uuid, table in zip(UUIDS, processes, strict=False) for pid, size in table.items()]
        put_driver(self._folder, self._monkeypatch, gpus, apps=apps)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(device_samples, "CLOCK_EVERY_S", 0.0)
    monkeypatch.setattr(device_samples, "MEMORY_EVERY_S", 0.0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Driver(tmp_path, monkeypatch)


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
        tables = [
            {pid: chance.choice([None, chance.randrange(2**36)]) for pid in chance.sample([*ranks, os.getppid(), 1], 3)}
            for _ in UUIDS
        ]
        driver.put(processes=tables)
        samples.sample()
        for table in tables[:2]:  # the trial has two of the three GPUs
            expected = max(expected, sum(size or 0 for pid, size in table.items() if pid in ranks))
    assert samples.peak_bytes == expected > 0


def test_no_process_of_the_trial_on_a_gpu_is_no_peak(driver: Driver) -> None:
    samples = DeviceSamples(3)
    driver.put(processes=[{1: 2**30}, {}, {os.getppid(): 5}])
    samples.sample()
    assert samples.peak_bytes is None


def test_the_clock_is_that_of_the_slowest_held_gpu(driver: Driver) -> None:
    samples = DeviceSamples(2)
    driver.put(clocks=[1980, 1410, 300])
    samples.sample()
    assert samples.clock_at(0.0) == 1410.0


@pytest.mark.parametrize(("visible", "clock"), [("2,0", 300), (f"{UUIDS[1]},0", 1410), ("GPU-6b2e,0,1", 300)])
def test_gpus_are_those_that_the_variable_names_first(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, visible: str, clock: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    driver.put(clocks=[1980, 1410, 300])
    samples = DeviceSamples(2)
    samples.sample()
    assert samples.clock_at(0.0) == clock


def test_a_card_without_a_clock_has_samples_of_its_memory_alone(
    driver: Driver, ranks: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del driver
    silent = FakeGpu(name="NVIDIA L4", uuid="GPU-1", without=frozenset({"ClockInfo"}))
    put_driver(tmp_path, monkeypatch, [silent], apps=[(ranks[0], "GPU-1", 7)])
    samples = DeviceSamples(1)
    samples.sample()
    assert (samples.clock_at(0.0), samples.peak_bytes) == (None, 7)


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


def test_without_gpus_or_a_driver_there_are_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAKE_NVML", raising=False)
    for samples in (DeviceSamples(0), DeviceSamples(2)):
        samples.sample()
        assert (samples.clock_at(1.0), samples.peak_bytes) == (None, None)
