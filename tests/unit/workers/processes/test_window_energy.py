"""Energy of a window: drawn counters that begin anew, counters that are missing, and this machine's own."""

import random
import shutil
from pathlib import Path

import pytest

from ablate.workers.commands import device_samples
from ablate.workers.commands.device_samples import POWER_CAP, DeviceSamples, WindowEnergy, package_energy
from tests.nvidia_gpus import FakeGpu, put_driver
from tests.programs import program_config, ran, write_program

UUIDS = ("GPU-5a1c0000-aaaa", "GPU-5a1d0000-bbbb")


@pytest.fixture(autouse=True)
def _each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_samples, "ENERGY_EVERY_S", 0.0)
    monkeypatch.setattr(device_samples, "GPU_WINDOW_S", 0.0)


def zone(folder: Path, number: int | str, name: str, **values: int | str) -> Path:
    """Make the files of one zone of the kernel's power caps."""
    path = folder / f"intel-rapl:{number}"
    path.mkdir(parents=True, exist_ok=True)
    for file, value in {"name": name, **values}.items():
        (path / file).write_text(f"{value}\n")
    return path


@pytest.mark.parametrize("seed", range(30))
def test_the_energy_of_packages_is_what_they_took_however_often_their_counters_began_anew(
    tmp_path: Path, seed: int
) -> None:
    """The truth is counted without limits. Between two looks a counter begins anew at most once."""
    rng = random.Random(seed)  # noqa: S311 - draws that repeat
    limits = [rng.choice([1, 1_000, 2**32 - 1, 262_143_328_850]) for _ in range(rng.choice([1, 2, 4]))]
    totals = [rng.randrange(10 * limit) for limit in limits]

    def put() -> None:
        for number, (total, limit) in enumerate(zip(totals, limits, strict=True)):
            zone(tmp_path, number, f"package-{number}", energy_uj=total % limit, max_energy_range_uj=limit)

    def spend() -> None:
        for place, limit in enumerate(limits):
            totals[place] += rng.choice([0, 1, limit // 3, limit - 1]) if limit > 1 else 0
        put()

    put()
    zone(tmp_path, "0:0", "core", energy_uj=7, max_energy_range_uj=10)
    zone(tmp_path, 9, "psys", energy_uj=7, max_energy_range_uj=10)
    energy = package_energy(tmp_path)
    for _window in range(2):
        spend()
        began = sum(totals)
        energy.begin()
        assert energy.joules is None
        for _look in range(rng.choice([0, 1, 20])):
            spend()
            energy.sample()
        spend()
        energy.end()
        assert energy.joules == (sum(totals) - began) / 1e6
        assert energy.of == "processor packages"


def test_without_a_whole_answer_there_is_no_energy_and_never_zero(tmp_path: Path) -> None:
    zone(tmp_path, 0, "package-0", energy_uj=5, max_energy_range_uj=100)
    unlimited = zone(tmp_path, 1, "package-1", energy_uj=5)
    assert window_of(package_energy(tmp_path)) is None, "no limit"
    (unlimited / "max_energy_range_uj").write_text("100")
    assert window_of(package_energy(tmp_path)) == 0.0
    energy = package_energy(tmp_path)
    for when in ("before", "between", "at the end"):
        if when == "before":
            (unlimited / "energy_uj").write_text("no number")
        energy.begin()
        if when == "between":
            (unlimited / "energy_uj").write_text("")
            energy.sample()
        (unlimited / "energy_uj").write_text("5")
        if when == "at the end":
            (unlimited / "energy_uj").unlink()
        energy.end()
        assert energy.joules is None, when
        (unlimited / "energy_uj").write_text("5")
    shutil.rmtree(tmp_path)
    assert window_of(package_energy(tmp_path)) is None


def window_of(energy: WindowEnergy) -> float | None:
    energy.begin()
    energy.end()
    return energy.joules


@pytest.mark.parametrize(("seconds", "joules"), [(1.99, None), (2.0, 3.0)])
def test_a_window_that_is_short_beside_the_times_of_a_counter_has_no_energy(
    monkeypatch: pytest.MonkeyPatch, seconds: float, joules: float | None
) -> None:
    moments, counters = iter([64.0, 64.0 + seconds]), iter([5, 8])
    monkeypatch.setattr(device_samples.time, "monotonic", lambda: next(moments))
    assert window_of(WindowEnergy("GPUs", lambda: [next(counters)], shortest_s=2.0)) == joules


@pytest.mark.parametrize("seed", range(5))
def test_the_energy_of_gpus_is_that_of_the_held_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)  # noqa: S311 - draws that repeat
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(*energies: int | None) -> None:
        gpus = [FakeGpu(name="L4", uuid=uuid, energy_mj=one) for uuid, one in zip(UUIDS, energies, strict=True)]
        put_driver(tmp_path, monkeypatch, gpus)

    first, second = rng.randrange(2**63), rng.randrange(2**63)
    for devices, after, expected in (
        (1, (first + 1_500, second + 7_000), 1.5),
        (2, (first + 1_500, second + 7_000), 8.5),
        (2, (first, second), 0.0),
        (2, (first + 1, None), None),
        (2, (first + 1, second - 1), None),
        (1, (first + 1, second - 1), 0.001),
    ):
        put(first, second)
        samples = DeviceSamples(devices)
        samples.energy.begin()
        put(*after)
        samples.energy.end()
        assert (samples.energy.joules, samples.energy.of) == (expected, "GPUs")


def test_a_program_here_has_the_energy_of_this_machine_or_none(tmp_path: Path) -> None:
    result = ran(program_config(write_program(tmp_path / "code"), args=("--step", "0.02")), tmp_path / "home")
    assert result.failure_class is None, result.message
    assert result.program is not None
    has_counters = package_energy(POWER_CAP).of != ""
    dumped = result.program.model_dump(mode="json")
    assert ("energy_j" in dumped, "energy_of" in dumped) == (has_counters, has_counters)
    assert "loading_s" not in dumped


LOADS = """
import ablate, time
with ablate.trial(seed=7) as trial:
    for step in trial.steps():
        with step.loading():
            time.sleep(0.02)
        step.report(loss=1.0, tokens=10)
"""


def test_the_time_in_which_a_program_waits_for_data_is_that_of_the_timed_steps(tmp_path: Path) -> None:
    result = ran(
        program_config(write_program(tmp_path / "code", LOADS), command=("python", "train.py")), tmp_path / "h"
    )
    assert result.failure_class is None, result.message
    report = result.program
    assert report is not None
    assert report.loading_s is not None
    assert report.window_s is not None
    assert 3 * 0.02 <= report.loading_s <= report.window_s
