import json
import random

import pytest
from pydantic import ValidationError

from experiments.records.receipts import DeviceEvents
from workers.blocks.surroundings import changes
from workers.devices.probe_types import DeviceState


def test_changes_are_seconds_new_errors_and_other_processes() -> None:
    before = DeviceState(sw_power_cap_us=1_000_000, ecc_uncorrected=2, processes=(7,))
    after = DeviceState(sw_power_cap_us=3_500_000, ecc_uncorrected=2, processes=())
    found = changes(before, after)
    assert found == DeviceEvents(sw_power_cap=2.5, ecc_uncorrected=0, foreign_processes=(7,))
    assert json.loads(found.model_dump_json()) == {"sw_power_cap": 2.5, "ecc_uncorrected": 0, "foreign_processes": [7]}


def test_changes_nothing_to_ask() -> None:
    assert changes(None, DeviceState()) is None
    assert changes(DeviceState(), None) is None


def test_changes_a_counter_that_was_reset_or_not_told_is_unknown() -> None:
    before = DeviceState(hw_thermal_slowdown_us=500, ecc_uncorrected=3, processes=())
    after = DeviceState(hw_thermal_slowdown_us=20, sw_power_cap_us=9, ecc_uncorrected=1)
    assert changes(before, after) == DeviceEvents()


def test_changes_of_random_counters_against_plain_subtraction() -> None:
    draw = random.Random(20261122)  # noqa: S311 - a repeatable draw
    names = {
        "sw_power_cap_us": "sw_power_cap",
        "sw_thermal_slowdown_us": "sw_thermal_slowdown",
        "hw_thermal_slowdown_us": "hw_thermal_slowdown",
        "hw_power_brake_us": "hw_power_brake",
        "ecc_uncorrected": "ecc_uncorrected",
    }
    for _ in range(500):
        looks = [{name: draw.choice([None, draw.randrange(10**9)]) for name in names} for _ in range(2)]
        first, second = looks
        expected = {}
        for name, event in names.items():
            one, two = first[name], second[name]
            if one is not None and two is not None and two >= one:
                expected[event] = two - one if event == "ecc_uncorrected" else round((two - one) / 10**6, 6)
        found = changes(DeviceState(**first), DeviceState(**second))  # type: ignore[arg-type]
        assert found is not None
        assert found.model_dump(mode="json") == expected


@pytest.mark.parametrize("wrong", [{"hw_slowdown": 1}, {"ecc_uncorrected": -1}, {"sw_power_cap": "much"}])
def test_events_are_what_is_declared(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        DeviceEvents.model_validate(wrong)
