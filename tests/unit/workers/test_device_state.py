from workers.device_state import DeviceState, changes, parse_state


def test_parse_state_of_an_h200() -> None:
    state = parse_state("1200000, 0, 0, 0, 0\n", "4711\n4712\n")
    assert state.counters == {
        "sw_power_cap": 1_200_000,
        "sw_thermal_slowdown": 0,
        "hw_thermal_slowdown": 0,
        "hw_power_brake": 0,
        "ecc_uncorrected": 0,
    }
    assert state.processes == (4711, 4712)


def test_parse_state_leaves_out_what_the_driver_does_not_tell() -> None:
    state = parse_state("[N/A], 5, [N/A], 0, [N/A]", "[Not Found]\n")
    assert (state.counters, state.processes) == ({"sw_thermal_slowdown": 5, "hw_power_brake": 0}, ())


def test_changes_are_seconds_new_errors_and_other_processes() -> None:
    before = DeviceState(counters={"sw_power_cap": 1_000_000, "ecc_uncorrected": 2}, processes=(7,))
    after = DeviceState(counters={"sw_power_cap": 3_500_000, "ecc_uncorrected": 2}, processes=())
    assert changes(before, after) == {"sw_power_cap": 2.5, "ecc_uncorrected": 0, "foreign_processes": [7]}


def test_changes_nothing_to_ask() -> None:
    state = DeviceState(counters={}, processes=())
    assert changes(None, state) is None
    assert changes(state, None) is None
