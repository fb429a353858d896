import pytest

from experiments.analysis.guards import receipt_problems
from experiments.records.receipts import DeviceEvents
from tests.factories import make_plan, make_receipt

HARMLESS = {"sw_power_cap"}
FATAL = sorted(set(DeviceEvents.model_fields) - HARMLESS)


def problems(**throttle: object) -> list[str]:
    plan = make_plan()
    return receipt_problems(make_receipt(plan, 0, "baseline", environment={"throttle": throttle}), plan)


def _happened(name: str) -> object:
    return {"ecc_uncorrected": 1, "foreign_processes": [4711]}.get(name, 0.000001)


@pytest.mark.parametrize("name", FATAL)
def test_every_event_but_a_power_cap_makes_a_trial_invalid(name: str) -> None:
    (found,) = problems(**{name: _happened(name)})
    assert found.endswith(" during the trial")
    assert len(problems(**{other: _happened(other) for other in FATAL})) == len(FATAL)


def test_events_that_did_not_happen_or_were_not_told_are_no_problem() -> None:
    assert problems(**{name: [] if name == "foreign_processes" else 0 for name in DeviceEvents.model_fields}) == []
    assert problems(**dict.fromkeys(DeviceEvents.model_fields)) == []
    assert problems(sw_power_cap=3.5) == []
