"""Arms that train on equal tokens or with equal FLOPs: their steps against a count of their own."""

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from ablate.experiments.design.arms import Arm
from ablate.experiments.design.checks import trained
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.workload import MAX_TIMED
from ablate.experiments.errors import SpecError, SpecProblem
from tests.factories import command_values, make_spec
from tests.unit.experiments.design.flop_oracle import step_flops

TIMED = "#/workload/steps/timed"
DIVIDE = "numbers that divide: "


def steps_of(arm: Arm) -> int:
    steps = arm.config.steps
    return 1 + steps.warmup + steps.timed


def planned(
    equal: str, *, warmup: int, timed: int, base: Mapping[str, Any], **variants: Any
) -> tuple[tuple[Arm, ...], Sequence[SpecProblem]]:
    """Return the arms of a plan, or its problems."""
    spec = make_spec(
        workload__overrides=base,
        workload__steps={"warmup": warmup, "warmup_s": 0, "timed": timed, "val_rows": 2, "equal": equal},
        baseline={},
        variants={name: {"overrides": values} for name, values in variants.items()},
        design={"seeds": 6, "blocks": {"count": 6}},
        verdict__primary={"metric": "loss_val", "margin": "1%"},
    )
    try:
        return make_plan(spec).arms, ()
    except SpecError as error:
        return (), error.problems


def fits(timed: int, *, warmup: int, base: int, batches: Iterable[int]) -> bool:
    total = (1 + warmup + timed) * base
    return all(total % batch == 0 and 1 <= total // batch - 1 - warmup <= MAX_TIMED for batch in batches)


def test_drawn_batches_train_on_equal_tokens_or_are_refused_with_the_nearest_numbers_that_divide() -> None:
    chance, refused = random.Random(4), 0  # noqa: S311  # not for secrets
    for _ in range(60):
        warmup, timed = chance.choice((0, 1, chance.randint(2, 40))), chance.choice((1, chance.randint(2, 400)))
        rows = [chance.choice((1, 2, chance.randint(1, 64), 4096)) for _ in range(3)]
        batches = sorted({*rows[1:]} - {rows[0]}) or [rows[0] % 4096 + 1]
        fit = partial(fits, warmup=warmup, base=rows[0], batches=batches)
        own = {f"v{batch}": {"micro_batch": batch} for batch in batches}
        arms, problems = planned("tokens", warmup=warmup, timed=timed, base={"micro_batch": rows[0]}, **own)
        assert fit(timed) == (not problems)
        if not problems:
            assert {steps_of(arm) * arm.config.micro_batch for arm in arms} == {(1 + warmup + timed) * rows[0]}
            assert {arm.config.steps.warmup for arm in arms} == {warmup}
            assert steps_of(arms[0]) == 1 + warmup + timed
            continue
        refused += 1
        assert {problem.pointer for problem in problems} == {TIMED}
        hint = str(problems[0].hint)
        if hint.startswith(DIVIDE):
            below = next((n for n in range(timed - 1, 0, -1) if fit(n)), None)
            above = next((n for n in range(timed + 1, MAX_TIMED + 1) if fit(n)), None)
            assert hint == DIVIDE + (", ".join(str(n) for n in (below, above) if n is not None) or "none")
    assert 10 < refused < 55


def test_drawn_models_train_with_equal_flops_to_the_nearest_step() -> None:
    chance, coarse = random.Random(5), 0  # noqa: S311  # not for secrets
    for _ in range(40):
        own: dict[str, Any] = {
            "d_model": 64 * chance.randint(1, 4),
            "pattern": "".join(chance.choices("MAF", k=chance.randint(1, 6))),
            "mlp_ratio": chance.uniform(0.5, 8.0),
            "micro_batch": chance.randint(1, 6),
        }
        warmup, timed = chance.randint(0, 20), chance.choice((chance.randint(1, 40), chance.randint(60, 400)))
        arms, problems = planned("flops", warmup=warmup, timed=timed, base={"micro_batch": 2}, other=own)
        assert {problem.pointer for problem in problems} <= {TIMED}
        if problems:
            if "allowed: 0.1%" in problems[0].detail:
                coarse += 1
                hint = str(problems[0].hint).removeprefix("numbers that fit: ")
                for fitting in (int(one.replace(",", "")) for one in hint.split(", ") if one != "none"):
                    again = planned("flops", warmup=warmup, timed=fitting, base={"micro_batch": 2}, other=own)
                    assert again[1] == ()
                    between = range(min(fitting, timed) + 1, max(fitting, timed))
                    for other_timed in chance.sample(between, min(3, len(between))):
                        worse = planned("flops", warmup=warmup, timed=other_timed, base={"micro_batch": 2}, other=own)
                        assert {problem.pointer for problem in worse[1]} == {TIMED}
            continue
        base, other = arms
        target, step = step_flops(base.config) * steps_of(base), step_flops(other.config)
        nearest = min(range(1, 3 * target // step + 2), key=lambda total: abs(total * step - target))
        assert abs(steps_of(other) * step - target) == abs(nearest * step - target) <= 0.001 * target
        assert trained(other.config) == (steps_of(other) * own["micro_batch"] * 256, steps_of(other) * step)
    assert coarse > 3


def test_drawn_models_have_equal_parameters_or_are_refused() -> None:
    chance, refused = random.Random(6), 0  # noqa: S311  # not for secrets
    for _ in range(60):
        base, own = ({"pattern": "AF" * chance.randint(1, 40), "d_model": 128} for _ in range(2))
        if base == own:
            continue
        blocks = [len(one["pattern"]) // 2 for one in (base, own)]
        sizes = [(4 + 3 * 2) * 128**2 * pairs + 2 * pairs * 128 + 2 * 4096 * 128 + 128 for pairs in blocks]
        arms, problems = planned("parameters", warmup=1, timed=4, base=base, other=own)
        equal = abs(sizes[1] - sizes[0]) <= 0.02 * sizes[0]
        refused += not equal
        assert equal == (not problems)
        assert [steps_of(arm) for arm in arms] == ([6, 6] if equal else [])
        if problems:
            assert [problem.pointer for problem in problems] == ["#/variants/other"]
            assert f"has {sizes[1]:,} parameters" in problems[0].detail
            assert f"the baseline's {sizes[0]:,}; allowed: 2%" in problems[0].detail
    assert 20 < refused < 58


def test_equal_steps_are_the_default_and_change_no_arm() -> None:
    plain = make_spec(variants={"rows": {"overrides": {"micro_batch": 4}}})
    explicit = make_spec(variants={"rows": {"overrides": {"micro_batch": 4}}}, workload__steps__equal="steps")
    assert plain.digest == explicit.digest
    assert [arm.config.steps.timed for arm in make_plan(plain).arms] == [4, 4]


@pytest.mark.parametrize(("val_every", "own"), [(20, 10), (7, 4), (1, 1), (148, 73)])
def test_arms_validate_after_about_equally_many_tokens(val_every: int, own: int) -> None:
    steps = {"warmup": 1, "warmup_s": 0, "timed": 148, "val_rows": 2, "val_every": val_every, "equal": "tokens"}
    base, rows = make_plan(make_spec(workload__steps=steps, variants={"rows": {"gates": {"micro_batch": 4}}})).arms
    assert (base.config.steps.val_every, rows.config.steps.val_every) == (val_every, own)


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"warmup": 10, "timed": 5}, TIMED, "needs -7 timed steps; allowed: 1 to 10,000"),
        ({"warmup": 1, "timed": 5}, TIMED, "7 steps of the baseline have 3,584 tokens"),
        ({"warmup": 1, "timed": 4, "slice": 2}, "#/workload/steps/equal", "trials in slices"),
    ],
)
def test_steps_that_cannot_be_equal_work_are_refused(changes: dict[str, Any], where: str, words: str) -> None:
    steps = {"warmup_s": 0, "val_rows": 2, "equal": "tokens", **changes}
    with pytest.raises(SpecError) as caught:
        make_plan(make_spec(workload__steps=steps, variants={"rows": {"gates": {"micro_batch": 8}}}))
    assert [problem.pointer for problem in caught.value.problems] == [where]
    assert words in caught.value.problems[0].detail


@pytest.mark.parametrize("equal", ["tokens", "flops", "parameters"])
def test_the_work_and_parameters_of_a_command_are_unknown_before_it_runs(equal: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_plan(make_spec(**command_values(workload__steps__equal=equal)))
    assert [problem.pointer for problem in caught.value.problems] == ["#/workload/steps/equal"]
