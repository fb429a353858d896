"""Load by others on the cores: a positive control with a process that is busy, and counters that tell nothing."""

import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ablate.model import host_load
from ablate.model.host_load import HostLoad, core_times

SPIN = "print('begun', flush=True)\nwhile True: pass"


def test_a_busy_process_beside_us_is_seen_as_load() -> None:
    """Pinned to one core with it, so that it must take about half of that core whatever else runs here."""
    cores = os.sched_getaffinity(0)
    one = {min(cores)}
    os.sched_setaffinity(0, one)
    other = subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    try:
        load, spent_s = HostLoad(), time.process_time()
        while time.process_time() < spent_s + 0.5:
            pass
        share = load.shares().foreign
    finally:
        other.kill()
        other.communicate()
        os.sched_setaffinity(0, cores)
    assert share is not None
    assert 0.2 < share <= 1.0


def write(path: Path, *, busy: int, idle: int, cores: int, steal: int = 0) -> None:
    rows = [f"cpu{core} {busy} 0 0 {idle} 50 0 0 {steal} 0 0" for core in range(cores)]
    path.write_text("cpu 1 2 3 4 5 6 7 8 9 10\n" + "\n".join(rows) + "\nintr 5 6\n")


def test_core_times_are_those_of_our_cores_without_idle_and_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_load, "_STAT", tmp_path / "stat")
    write(tmp_path / "stat", busy=300, idle=900, cores=4, steal=70)
    tick = 1 / os.sysconf("SC_CLK_TCK")
    times = core_times({0, 2})
    assert times is not None
    assert (times.busy_s, times.stolen_s) == (pytest.approx(740 * tick), pytest.approx(140 * tick))
    assert core_times({0, 4}) is None  # a core that the kernel does not list


def test_time_that_a_hypervisor_stole_is_load_by_others_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A positive control: a second of this process's work, with half of the cores' time stolen meanwhile."""
    clock = [0.0]
    monkeypatch.setattr(host_load, "_STAT", tmp_path / "stat")
    times = SimpleNamespace(perf_counter=lambda: clock[0], process_time=lambda: clock[0])
    monkeypatch.setattr(host_load, "time", times)
    cores, ticks = len(os.sched_getaffinity(0)), os.sysconf("SC_CLK_TCK")
    write(tmp_path / "stat", busy=0, idle=900, cores=max(os.sched_getaffinity(0)) + 1)
    load = HostLoad()
    clock[0] += 1.0
    ours, stolen = round(ticks / cores), round(ticks / 2)
    write(tmp_path / "stat", busy=ours, idle=900, cores=max(os.sched_getaffinity(0)) + 1, steal=stolen)
    shares = load.shares()
    assert shares.foreign is not None
    assert shares.stolen == pytest.approx(0.5, abs=0.03)  # less two ticks of the counters
    assert shares.foreign >= shares.stolen - 0.1


def test_counters_that_do_not_move_are_not_an_idle_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sandboxes print constants: less than this process used itself is no answer."""
    clock = [0.0]
    monkeypatch.setattr(host_load, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(host_load, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    write(tmp_path / "stat", busy=300, idle=900, cores=os.cpu_count() or 1)
    load = HostLoad(own_s=lambda: clock[0])
    clock[0] += 0.5
    assert (load.shares().foreign, load.shares().stolen) == (None, None)
    monkeypatch.setattr(host_load, "_STAT", tmp_path / "missing")
    assert HostLoad().shares().foreign is None


def test_load_counts_in_the_measured_parts_and_not_in_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn parts and pauses, with counters and clocks that say exactly what happened in each."""
    chance = random.Random(3)  # noqa: S311 - reproducible by design
    cores, clock = len(os.sched_getaffinity(0)), [0.0]
    monkeypatch.setattr(host_load, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(host_load, "time", SimpleNamespace(perf_counter=lambda: clock[0], process_time=lambda: 0.0))
    ticks, busy = os.sysconf("SC_CLK_TCK"), [0]

    def pass_s(seconds: int, share: float) -> None:
        clock[0] += seconds
        busy[0] += round(share * seconds * ticks)
        write(tmp_path / "stat", busy=busy[0], idle=0, cores=max(os.sched_getaffinity(0)) + 1)

    for _ in range(20):
        pass_s(1, 0.0)
        load, parts = HostLoad(), [(chance.randint(1, 30), chance.random()) for _ in range(chance.randint(1, 8))]
        for seconds, share in parts[:-1]:
            pass_s(seconds, share)
            load.pause()
            pass_s(chance.randint(1, 50), chance.choice([0.0, 1.0]))
            load.resume()
        pass_s(*parts[-1])
        whole = sum(seconds for seconds, _ in parts)
        slack = 2 * cores / ticks * math.sqrt(len(parts))
        expected = (sum(seconds * share for seconds, share in parts) * cores - slack) / (whole * cores)
        assert load.shares().foreign == pytest.approx(max(0.0, expected), abs=0.005 * len(parts))
