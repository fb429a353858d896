from dataclasses import asdict
from pathlib import Path

import pytest

from tests.nvidia_smi import TWO_GPUS, put_gpus, put_smi
from workers.blocks.surroundings import changes
from workers.devices.nvidia_probe import NvidiaProbe, parse_state
from workers.devices.probe_types import DeviceState


def test_nvidia_find_reads_columns_and_missing_serials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpus(tmp_path, monkeypatch)
    probe = NvidiaProbe()
    found = probe.find()
    first, second = found.devices
    assert (first.index, first.name, first.serial, found.driver) == (0, "NVIDIA H200", "1652823001234", "570.124.06")
    assert first.memory_bytes == 143771 * 2**20
    assert second.serial is None
    assert probe.memory_used() == {0: 4 * 2**20, 1: 520 * 2**20}


def test_nvidia_driver_without_gpus_is_no_surprise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_smi(tmp_path, monkeypatch, "true")
    found = NvidiaProbe().find()
    assert (found.devices, found.driver, found.lacks) == ((), None, ())


def test_parse_state_of_an_h200() -> None:
    assert parse_state("1200000, 0, 7, 0, 1\n", (4711, 4712)) == DeviceState(
        sw_power_cap_us=1_200_000,
        sw_thermal_slowdown_us=0,
        hw_thermal_slowdown_us=7,
        hw_power_brake_us=0,
        ecc_uncorrected=1,
        processes=(4711, 4712),
    )


def test_parse_state_what_the_driver_does_not_tell_is_not_0() -> None:
    state = parse_state("[N/A], 5, [N/A], 0, [N/A]", ())
    assert state == DeviceState(sw_thermal_slowdown_us=5, hw_power_brake_us=0, processes=())
    assert parse_state(None, (4711,)) == DeviceState(processes=(4711,))


def test_a_process_without_a_number_is_not_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = 'case "$*" in *compute-apps*) printf "[N/A], GPU-1\\n4711, GPU-1\\n";; *) echo "0, 0, 0, 0, 0";; esac'
    put_smi(tmp_path, monkeypatch, hidden)
    state = NvidiaProbe().state(0)
    assert state is not None
    assert state.processes is None
    assert state == parse_state("0, 0, 0, 0, 0", None)


def test_nvidia_state_asks_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = 'case "$*" in *compute-apps*) echo 4711;; *--id=1*) echo "9, 8, 7, 6, 5";; *) exit 1;; esac'
    put_smi(tmp_path, monkeypatch, counters)
    probe = NvidiaProbe()
    assert probe.state(1) == parse_state("9, 8, 7, 6, 5", (4711,))
    assert probe.state(0) == DeviceState(processes=(4711,))
    put_smi(tmp_path, monkeypatch, "exit 6")
    assert probe.state(1) is None


def test_every_event_that_a_receipt_can_hold_is_told_by_a_full_answer() -> None:
    """An event that nobody produces would pass every guard for ever."""
    events = changes(parse_state("1, 2, 3, 4, 5", (6,)), parse_state("1, 2, 3, 4, 5", (6,)))
    assert events is not None
    assert None not in events.model_dump().values()
    assert set(events.model_dump()) == set(type(events).model_fields)
    assert None not in asdict(parse_state("1, 2, 3, 4, 5", (6,))).values()


def test_two_gpus_stand_for_what_the_query_prints() -> None:
    assert all(len(line.split(",")) == 7 for line in TWO_GPUS.splitlines())
