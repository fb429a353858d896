from typing import Any

import pytest

from experiments.analysis.guards import _SAME_IN_BLOCK, block_problems, receipt_problems
from experiments.records.receipts import DeviceEvents
from tests.factories import make_plan, make_receipt

HARMLESS = {"sw_power_cap"}
FATAL = sorted(set(DeviceEvents.model_fields) - HARMLESS)


def problems(**throttle: object) -> list[str]:
    plan = make_plan()
    return receipt_problems(make_receipt(plan, 0, "baseline", environment={"throttle": throttle}), plan)


def _happened(name: str) -> object:
    return {"foreign_processes": [4711]}.get(name, 1)


@pytest.mark.parametrize("name", FATAL)
def test_every_event_but_a_power_cap_makes_a_trial_invalid(name: str) -> None:
    (found,) = problems(**{name: _happened(name)})
    assert found.endswith(" during the trial")
    assert len(problems(**{other: _happened(other) for other in FATAL})) == len(FATAL)


def test_events_that_did_not_happen_or_were_not_told_are_no_problem() -> None:
    assert problems(**{name: [] if name == "foreign_processes" else 0 for name in DeviceEvents.model_fields}) == []
    assert problems(**dict.fromkeys(DeviceEvents.model_fields)) == []
    assert problems(sw_power_cap=3.5) == []


OTHERWISE: dict[str, dict[str, Any]] = {
    "code": {"digests": {"code": "sha256:other"}},
    "data": {"digests": {"data": "sha256:other"}},
    "device": {"ids": {"device": "node-a/1"}},
    "attempt": {"ids": {"attempt": "att_other"}},
    "uncommitted patch": {"environment": {"git_dirty_digest": "sha256:other"}},
    "software versions": {"environment": {"versions": {"torch": "2.12"}}},
    "number of CPU threads": {"environment": {"cpu_threads": 7}},
}
"""What else a receipt of the same block could say, for every guard of a block."""


def test_every_guard_of_a_block_has_a_case() -> None:
    assert set(OTHERWISE) == set(_SAME_IN_BLOCK)


@pytest.mark.parametrize("what", OTHERWISE)
def test_block_is_invalid_when_one_trial_differs(what: str) -> None:
    plan = make_plan()
    receipts = [make_receipt(plan, 0, arm) for arm in plan.blocks[0].order]
    assert block_problems(receipts) == []
    ((part, changes),) = OTHERWISE[what].items()
    changed = getattr(receipts[-1], part).model_copy(update=changes)
    receipts[-1] = receipts[-1].model_copy(update={part: changed})
    assert block_problems(receipts) == [f"{what} differs inside the block"]
