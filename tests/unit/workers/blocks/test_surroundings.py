import os
import random
import subprocess
import sys

import psutil

from ablate.experiments.records.receipts import DeviceEvents, ForeignProcess
from ablate.workers.blocks.surroundings import MOST, busiest, process_times, worst_of
from ablate.workers.devices.probe_types import DeviceState, changes
from tests.waiting import until


def test_changes_list_the_processes_of_both_states() -> None:
    before, after = DeviceState(ecc_uncorrected=2, processes=(7,)), DeviceState(ecc_uncorrected=2, processes=())
    assert changes(before, after) == DeviceEvents(ecc_uncorrected=0, foreign_processes=(7,))
    assert changes(before, DeviceState(ecc_uncorrected=2)) == DeviceEvents(ecc_uncorrected=0)
    assert changes(None, before) is None
    assert changes(before, None) is None


def test_changes_of_random_counters_against_plain_subtraction() -> None:
    """A counter that was reset, or that one state lacks, is unknown."""
    draw = random.Random(20261122)  # noqa: S311 - a repeatable draw
    names = {
        "sw_power_cap_us": "sw_power_cap",
        "sw_thermal_slowdown_us": "sw_thermal_slowdown",
        "hw_thermal_slowdown_us": "hw_thermal_slowdown",
        "hw_power_brake_us": "hw_power_brake",
        "ecc_uncorrected": "ecc_uncorrected",
    }
    for _ in range(500):
        first, second = ({name: draw.choice([None, draw.randrange(10**9)]) for name in names} for _ in range(2))
        expected = {}
        for name, event in names.items():
            one, two = first[name], second[name]
            if one is not None and two is not None and two >= one:
                expected[event] = two - one if event == "ecc_uncorrected" else round((two - one) / 10**6, 6)
        events = changes(DeviceState(**first), DeviceState(**second))  # type: ignore[arg-type]
        assert events is not None
        assert events.model_dump(mode="json") == expected


def test_busiest_names_a_busy_process() -> None:
    before = process_times()
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        watched = psutil.Process(other.pid)
        until(lambda: watched.cpu_times().user > 0.3)
        after = process_times()
    finally:
        other.kill()
        other.wait()
    after = {key: value for key, value in after.items() if key[0] in (other.pid, os.getpid())}
    assert other.pid in {process.pid for process in busiest(before, after)}


def test_busiest_subtracts_sorts_and_excludes() -> None:
    before = {(1, 0.0): ("init", 50.0), (2, 0.0): ("editor", 10.0), (3, 0.0): ("idle", 7.0)}
    after = {
        (1, 0.0): ("init", 50.2),
        (2, 0.0): ("editor", 14.0),
        (3, 0.0): ("idle", 7.01),
        (3, 9.0): ("reused", 1.5),
        (5, 1.0): ("compiler", 9.0),
    }
    assert busiest(before, after) == (
        ForeignProcess(pid=5, name="compiler", cpu_s=9.0),
        ForeignProcess(pid=2, name="editor", cpu_s=4.0),
        ForeignProcess(pid=3, name="reused", cpu_s=1.5),
    )
    assert len(busiest(before, after)) == MOST
    assert [process.pid for process in busiest(before, after, exclude={5, 3})] == [2, 1]
    assert busiest(after, after) == ()


def test_events_of_several_devices_against_a_plain_loop() -> None:
    """The longest slow-down, all errors and all processes; a number that one device lacks is unknown."""
    draw = random.Random(20261126)  # noqa: S311
    for _ in range(300):
        events = [
            DeviceEvents(
                sw_power_cap=draw.choice([None, draw.random()]),
                sw_thermal_slowdown=draw.random(),
                hw_thermal_slowdown=draw.choice([0.0, draw.random()]),
                hw_power_brake=0.0,
                ecc_uncorrected=draw.randrange(3),
                foreign_processes=tuple(draw.sample(range(9), draw.randint(0, 3))),
            )
            for _ in range(draw.randint(1, 8))
        ]
        worst = worst_of(events)
        assert worst is not None
        caps = [one.sw_power_cap for one in events]
        assert worst.sw_power_cap == (None if None in caps else max(cap for cap in caps if cap is not None))
        assert worst.sw_thermal_slowdown == sorted(one.sw_thermal_slowdown or 0.0 for one in events)[-1]
        assert worst.hw_thermal_slowdown == sorted(one.hw_thermal_slowdown or 0.0 for one in events)[-1]
        total = 0
        everybody: set[int] = set()
        for one in events:
            total += one.ecc_uncorrected or 0
            everybody |= set(one.foreign_processes or ())
        assert worst.ecc_uncorrected == total
        assert worst.foreign_processes == tuple(sorted(everybody))
        assert worst_of([*events, None]) is None
