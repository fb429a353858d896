import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ablate.experiments.design.plan import Plan
from ablate.experiments.ids import new_id
from ablate.experiments.records.identity import (
    AttemptLease,
    PlannedWork,
    claimed_block,
    claimed_fields,
    mismatches,
    new_block_ids,
    planned_fields,
)
from tests.factories import make_plan, make_receipt, make_spec

PLANS = st.builds(
    lambda seeds, blocks, order_seed: make_plan(
        make_spec(design__seeds=seeds, design__blocks={"count": blocks}, design__order_seed=order_seed)
    ),
    st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True),
    st.integers(6, 9),
    st.integers(0, 50),
)


def claimed_receipts(plan: Plan, index: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield what must be said, and a receipt of a trial that says it, for every arm of block `index`."""
    ids, node = new_block_ids(plan)[index], new_id("nod")
    lease = AttemptLease(attempt_id=new_id("att"), attempt_no=2)
    work = PlannedWork(ablation_id=new_id("abl"), block_index=index, timeout_s=60)
    block = claimed_block(plan, ids, work, lease)
    for trial in block.trials:
        named = {"ablation": block.ablation_id, "block": ids.block_id, "attempt": lease.attempt_id, "node": node}
        receipt = make_receipt(plan, index, trial.arm, ids={**named, "trial": ids.trial_ids[trial.position]})
        yield claimed_fields(block, trial, node_id=node), json.loads(receipt.model_dump_json())


def leaves(value: dict[str, Any], path: str = "") -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, item in value.items():
        where = f"{path}/{key}".lstrip("/")
        fields |= leaves(item, where) if isinstance(item, dict) else {where: item}
    return fields


@settings(max_examples=25, deadline=None)
@given(PLANS, st.data())
def test_receipt_of_a_claimed_trial_says_what_it_must(plan: Plan, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(plan.blocks) - 1))
    for expected, receipt in claimed_receipts(plan, index):
        assert list(mismatches(receipt, expected)) == []
        fixed = planned_fields(plan, index, receipt["arm"])
        assert list(mismatches(receipt, fixed)) == []
        del fixed["environment"]
        assert leaves(fixed).items() <= leaves(expected).items()


@settings(max_examples=25, deadline=None)
@given(PLANS, st.data())
def test_every_field_that_says_something_else_is_named(plan: Plan, data: st.DataObject) -> None:
    expected, receipt = data.draw(st.sampled_from(list(claimed_receipts(plan, 1))))
    path = data.draw(st.sampled_from(sorted(leaves(expected))))
    changed: Any = copy.deepcopy(receipt)
    *parents, last = path.split("/")
    target = changed
    for name in parents:
        target = target[name]
    target[last] = data.draw(st.sampled_from([None, 777, "other", [1], {"a": 1}, 0.5]))
    assert [where for where, _ in mismatches(changed, expected)] == [path]
    target.pop(last)
    assert [where for where, _ in mismatches(changed, expected)] == [path]


def test_fields_are_those_that_place_a_trial() -> None:
    expected, _ = next(claimed_receipts(make_plan(), 0))
    ids = ("ablation", "attempt", "block", "block_index", "node", "position", "trial")
    digests = ("arm", "rule", "spec")
    fields = {"arm", "role", "seed", *(f"ids/{name}" for name in ids), *(f"digests/{name}" for name in digests)}
    assert set(leaves(expected)) == fields


@pytest.mark.parametrize("broken", [{}, {"ids": None}, {"ids": "x", "digests": []}])
def test_receipt_without_its_parts_lacks_every_field(broken: dict[str, Any]) -> None:
    expected, _ = next(claimed_receipts(make_plan(), 0))
    assert {where for where, _ in mismatches(broken, expected)} == set(leaves(expected))


def test_new_block_ids_are_distinct_and_one_for_every_trial() -> None:
    plan = make_plan()
    made = new_block_ids(plan)
    every = [trial for ids in made for trial in ids.trial_ids] + [ids.block_id for ids in made]
    assert len(set(every)) == len(every) == len(plan.blocks) * (len(plan.arms) + 1)
