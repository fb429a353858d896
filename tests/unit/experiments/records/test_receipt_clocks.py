"""The line of a block that ran in slices: good ones pass whatever was drawn, and every edit is found and named."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, TypeAlias

import pytest

from ablate.experiments.analysis.guards import order_problems
from ablate.experiments.analysis.judge import judge
from ablate.experiments.design.plan import Plan
from ablate.experiments.documents import seal
from ablate.experiments.outcomes import Outcome, VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED
from ablate.experiments.records.receipt_check import verify
from ablate.experiments.records.receipt_clocks import slice_problems
from ablate.experiments.records.receipts import Receipt, summarise
from ablate.model.measurements import Step
from tests.factories import make_plan, make_spec
from tests.sliced import sliced_receipts

Edit: TypeAlias = Callable[[list[Receipt]], Sequence[Receipt]]


def plan_of(timed: int, slice_steps: int, warmup: int = 1, warmup_s: float = 0.0) -> Plan:
    steps = {"warmup": warmup, "warmup_s": warmup_s, "timed": timed, "slice": slice_steps, "val_rows": 2}
    return make_plan(make_spec(workload={"recipe": "hybrid-tiny", "steps": steps}))


PLAN = plan_of(12, 3)
ONE_STEP = plan_of(8, 1)


def seeded(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - reproducible by design


def block(plan: Plan = PLAN, index: int = 0) -> list[Receipt]:
    return sliced_receipts(plan, index, seeded(5))


def problems_of(receipts: Sequence[Receipt]) -> list[str]:
    """Return the problems of a block's receipts, each by itself and together."""
    alone = [problem for receipt in receipts for problem in verify(receipt.model_dump(mode="json"))]
    return [*alone, *slice_problems(receipts)]


def test_what_a_perfect_worker_leaves_is_fine_whatever_the_slices_are() -> None:
    chance = seeded(7)
    for _ in range(40):
        size, number = chance.randint(1, 5), 2 * chance.randint(1, 4)
        plan = plan_of(size * number, size, chance.randint(0, 3), chance.choice([0.0, 0.5]))
        receipts = sliced_receipts(plan, chance.randrange(6), chance)
        assert problems_of(receipts) == []
        assert list(order_problems(receipts)) == []
        chance.shuffle(receipts)
        for some in (pair for count in (1, 2, 3) for pair in combinations(receipts, count)):
            assert list(slice_problems(some)) == []


def moved(receipt: Receipt, by_s: float, indices: range) -> Receipt:
    """Return a receipt whose steps of these indices happened later, digest and summary redone."""

    def later(step: Step) -> Step:
        shifted = {"began_s": step.began_s + by_s, "ended_s": step.ended_s + by_s}
        return step.model_copy(update=shifted if step.index in indices else {})

    return redone(receipt, steps=tuple(later(step) for step in receipt.steps))


def redone(receipt: Receipt, **changes: Any) -> Receipt:
    changed = receipt.model_copy(update=changes)
    assert changed.summary is not None
    summary = summarise(changed.steps, flops_per_step=changed.flops_per_step, loss_val=7.5, peak_flops=None)
    return seal(changed.model_copy(update={"summary": summary}))


def of_first(**changes: Any) -> Edit:
    return lambda receipts: [redone(receipts[0], **changes), *receipts[1:]]


def second_slice_moved(by_s: float) -> Edit:
    return lambda receipts: [receipts[0], moved(receipts[1], by_s, range(5, 8)), receipts[2]]


def swapped(receipts: list[Receipt]) -> list[Receipt]:
    """Give the first two arms each other's steps and clocks: as if each had run in the other's slices."""
    one, two, rest = receipts
    clocks = [{name: getattr(r, name) for name in ("training_began_s", "waited_s", "training_s")} for r in (one, two)]
    return [
        redone(one, steps=two.steps, wall_s=two.wall_s, **clocks[1]),
        redone(two, steps=one.steps, wall_s=one.wall_s, **clocks[0]),
        rest,
    ]


def in_one_go(receipts: list[Receipt]) -> list[Receipt]:
    """Move every slice of the first arm behind the others', as if it had run its window in one go at the end."""
    last = max((r.training_began_s or 0.0) + r.training_s + (r.waited_s or 0.0) for r in receipts)
    first = receipts[0]
    by_s = last - (first.training_began_s or 0.0) - first.steps[2].began_s
    steps = [s for s in first.steps if s.index < 2]
    at = first.steps[2].began_s + by_s
    for step in first.steps[2:]:
        steps.append(step.model_copy(update={"began_s": at, "ended_s": at + step.seconds}))
        at += step.seconds + 1e-4
    return [redone(first, steps=tuple(steps), waited_s=by_s + 1.0), *receipts[1:]]


EDITS: dict[str, tuple[Edit, str]] = {
    "a slice moved into another arm's": (second_slice_moved(-0.055), "ran where slice 2 of 4 of arm"),
    "a slice moved a little": (second_slice_moved(5e-3), "s before the end of slice 2 of 4 of arm"),
    "the arms' slices swapped": (swapped, "start and warm-up of arm"),
    "a window in one go": (in_one_go, "ran where slice 1 of 4 of arm"),
    "a training that began at another time": (of_first(training_began_s=3.0), "ran where"),
    "the begin of training erased": (of_first(training_began_s=None), "training_began_s is absent"),
    "waiting erased": (of_first(waited_s=None), "waited_s is absent; the configuration requests slices of 3"),
    "less waiting": (of_first(waited_s=0.01), "the last step's end: "),
    "negative waiting": (of_first(waited_s=-1.0), "below 0"),
    "no slices in one configuration": (
        lambda receipts: [
            redone(
                receipts[0],
                config=receipts[0].config.with_steps(replace(receipts[0].config.steps, slice=0)),
                waited_s=None,
            ),
            *receipts[1:],
        ],
        "differ in steps or slices",
    ),
}


def test_the_original_is_whole() -> None:
    assert problems_of(block()) == []
    assert problems_of(block(ONE_STEP)) == []


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_of_the_slices_with_every_digest_redone_is_found_and_named(what: str) -> None:
    edit, words = EDITS[what]
    problems = problems_of(edit(block()))
    assert any(words in problem for problem in problems), problems
    assert not any("was altered" in problem for problem in problems)


def test_a_trial_that_measured_nothing_leaves_its_slices_out() -> None:
    first, second, third = block()
    dead = second.model_copy(update={"outcome": Outcome.FAILED, "steps": second.steps[:5], "training_began_s": None})
    assert list(slice_problems([first, dead, third])) == []


def test_a_block_whose_slices_do_not_alternate_is_no_evidence() -> None:
    spec = make_spec(workload={"recipe": "hybrid-tiny", "steps": {"warmup": 1, "timed": 12, "slice": 3}})
    plan = make_plan(spec)
    blocks = [sliced_receipts(plan, index, seeded(index)) for index in range(6)]
    good = judge(plan, spec, [receipt for one in blocks for receipt in one], CALIBRATED)
    assert VerdictWord.INVALID not in {variant.verdict for variant in good.variants}
    assert good.rule["estimator"]["slice"] == 3
    blocks[2] = list(EDITS["a slice moved a little"][0](blocks[2]))
    verdict = judge(plan, spec, [receipt for one in blocks for receipt in one], CALIBRATED)
    assert {variant.verdict for variant in verdict.variants} == {VerdictWord.INVALID}
    assert all("block 3: slice 2 of 4 of arm" in variant.reason for variant in verdict.variants)
