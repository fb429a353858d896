import os
import random
import subprocess
import sys
import time

import psutil

from experiments.records.receipts import DeviceEvents, ForeignProcess
from workers.blocks.surroundings import MOST, busiest, changes, process_times
from workers.devices.probe_types import DeviceState


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
        while watched.cpu_times().user < 0.3:
            time.sleep(0.05)
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
