"""What the benches ask for can be asked for: a rule that refuses it fails here, not on the quiet machine."""

import json

import pytest

from experiments.design.load import parse_spec
from experiments.design.plan import make_plan
from experiments.records.plan_file import read_plan_file
from tests.bench import planted, scale
from tests.factories import make_spec


def test_scale_asks_for_100_000_trials() -> None:
    plan = make_plan(make_spec(**scale.large_changes()))
    assert len(plan.arms) * len(plan.blocks) == scale.ARMS_IN_LARGE * scale.LARGE_BLOCKS == 100_000


def test_submissions_are_of_a_spec_that_plans() -> None:
    assert make_plan(parse_spec(json.dumps(scale.SUBMITTED).encode(), "application/json")).blocks


@pytest.mark.parametrize(("blocks", "busy"), [(20, False), (37, False), (37, True)])
def test_what_is_planted_can_be_planned(blocks: int, busy: bool) -> None:
    plan = read_plan_file(planted.plan_text(blocks, 7, busy=busy).encode()).plan
    assert (len(plan.blocks), plan.max_foreign_load > 0.9) == (blocks, busy)
