"""The exact comparison, through the judge: words without statistics, and the proof that a metric is exact."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ablate.experiments.analysis.exact import _distinct
from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.verdicts import VariantVerdict
from ablate.experiments.design.arms import Arm
from ablate.experiments.design.checks import is_resident
from ablate.experiments.design.metrics import EXACT_METRICS, METRICS
from ablate.experiments.design.plan import BlockPlan, Plan
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.outcomes import Decision, VerdictWord
from ablate.experiments.records.circumstances import UNCALIBRATED
from ablate.experiments.records.receipts import Receipt
from ablate.kernels.backends import NODE_CLASSES, NodeClass
from tests.factories import GIB, make_plan, make_receipt, make_receipts, make_spec

Values = Callable[[str, int, int], int]
"""Peak bytes by arm, seed and block."""
VARIANT = "psiv-on"
BASE = 1_000_000
ROWS = {VARIANT: {"gates": {"micro_batch": 4}}}


def exact_spec(
    metric: str = "peak_allocated_gib", margin: str = "1%", adopt_if: str | None = "5%", **changes: Any
) -> AblationSpec:
    primary = {"metric": metric, "margin": margin} | ({"adopt_if": adopt_if} if adopt_if else {})
    values = {"design__blocks": {"count": 4}, "variants": {VARIANT: {"gates": {"psiv_cache": True}}}, **changes}
    return make_spec(verdict__primary=primary, **values)


def judged(spec: AblationSpec, receipt: Callable[[Plan, BlockPlan, Arm], Receipt]) -> VariantVerdict:
    plan = make_plan(spec)
    receipts = [receipt(plan, block, plan.arm_by_name[name]) for block in plan.blocks for name in block.order]
    return judge(plan, spec, receipts, UNCALIBRATED).variants[0]


def of_memory(values: Values, **changes: Any) -> VariantVerdict:
    def receipt(plan: Plan, block: BlockPlan, arm: Arm) -> Receipt:
        return make_receipt(plan, block, arm, peak_bytes=2 * values(arm.name, block.seed, block.index))

    return judged(exact_spec(**changes), receipt)


def scaled(factor: float) -> Values:
    return lambda arm, seed, _block: round((GIB + 4096 * seed) * (factor if arm == VARIANT else 1))


@pytest.mark.parametrize(
    ("factor", "verdict", "decision"),
    [
        (0.90, VerdictWord.BETTER, Decision.ADOPT),
        (0.97, VerdictWord.BETTER, Decision.REJECT),
        (0.995, VerdictWord.SAME, Decision.SAME),
        (1.0, VerdictWord.SAME, Decision.SAME),
        (1.02, VerdictWord.WORSE, Decision.REJECT),
    ],
)
def test_an_exact_metric_gets_its_verdict_without_calibration(
    factor: float, verdict: VerdictWord, decision: Decision
) -> None:
    variant = of_memory(scaled(factor))
    assert (variant.verdict, variant.measured, variant.decision) == (verdict, verdict, decision)
    assert (variant.primary, variant.blocks_needed) == (None, None)
    short = verdict is VerdictWord.BETTER and decision is Decision.REJECT
    assert variant.notes == (("better by 3.00 %, below the 5 % from which the rule adopts",) if short else ())
    assert variant.exact is not None
    assert variant.exact.problems == ()
    assert {pair.seed: pair.repeats for pair in variant.exact.seeds} == {1: 2, 2: 2}
    assert [pair.change_pct for pair in variant.exact.seeds] == pytest.approx([100 * (factor - 1)] * 2, abs=1e-4)


def test_a_margin_of_nothing_counts_every_byte() -> None:
    def one_byte(arm: str, _seed: int, _block: int) -> int:
        return GIB + 2 - 2 * (arm == VARIANT)

    assert of_memory(one_byte, margin="0%", adopt_if=None).decision is Decision.ADOPT
    assert of_memory(scaled(1.0), margin="0%", adopt_if=None).verdict is VerdictWord.SAME


@pytest.mark.parametrize("arm", ["baseline", VARIANT])
def test_one_repeat_that_differs_by_a_byte_takes_the_verdict_away_and_is_named(arm: str) -> None:
    def value(name: str, _seed: int, block: int) -> int:
        return (GIB if name == "baseline" else GIB // 2) + 2 * (block == 3 and name == arm)

    variant = of_memory(value)
    assert (variant.verdict, variant.decision) == (VerdictWord.INCONCLUSIVE, Decision.INCONCLUSIVE)
    assert f"arm '{arm}' with seed 2 gave 2 values" in variant.reason
    assert "(block 2)" in variant.reason
    assert "(block 4)" in variant.reason
    assert variant.exact is not None
    assert [pair.seed for pair in variant.exact.seeds] == [1]


def test_seeds_that_say_different_things_give_no_verdict() -> None:
    variant = of_memory(lambda arm, seed, _: GIB + (GIB // 4) * (-1) ** seed * (arm == VARIANT))
    assert variant.verdict is VerdictWord.INCONCLUSIVE
    assert variant.reason.endswith("the seeds do not agree")
    assert "-25.00 %" in variant.reason
    assert "+25.00 %" in variant.reason


def test_a_missing_value_or_block_gives_no_verdict() -> None:
    def without_memory(plan: Plan, block: BlockPlan, arm: Arm) -> Receipt:
        lost = {"memory": None} if (block.index, arm.name) == (1, VARIANT) else {}
        return make_receipt(plan, block, arm, **lost)

    variant = judged(exact_spec(), without_memory)
    assert (variant.verdict, variant.exact) == (VerdictWord.INCONCLUSIVE, None)
    assert "missing data fails" in variant.reason
    spec = exact_spec()
    plan = make_plan(spec)
    receipts = [make_receipt(plan, block, arm) for block in plan.blocks[:-1] for arm in plan.arms]
    (other,) = judge(plan, spec, receipts, UNCALIBRATED).variants
    assert other.verdict is VerdictWord.INCONCLUSIVE


def test_a_requirement_that_fails_rejects_what_is_better() -> None:
    require = [{"metric": "peak_allocated_gib", "max_value": 0.1}]
    variant = of_memory(scaled(0.5), verdict__require=require)
    assert (variant.verdict, variant.decision) == (VerdictWord.BETTER, Decision.REJECT)


@pytest.mark.parametrize(
    ("shift", "verdict"), [(0.0, VerdictWord.SAME), (1e-12, VerdictWord.WORSE), (-1e-12, VerdictWord.WORSE)]
)
def test_a_loss_answers_whether_it_is_identical(shift: float, verdict: VerdictWord) -> None:
    spec = exact_spec("loss_final", "0%", None, variants={VARIANT: {"gates": {"chunk_size": 32}}})

    def receipt(plan: Plan, block: BlockPlan, arm: Arm) -> Receipt:
        return make_receipt(plan, block, arm, loss_step1=8.0 + shift * (arm.name == VARIANT))

    variant = judged(spec, receipt)
    assert variant.verdict is verdict
    assert ("bit-identical over 4 blocks" in variant.reason) == (verdict is VerdictWord.SAME)


def test_counts_of_kernels_are_summed_and_a_count_from_nothing_is_worse() -> None:
    def receipt(plan: Plan, block: BlockPlan, arm: Arm) -> Receipt:
        spilled = 16 * (arm.name == VARIANT)
        rows = ({"name": "fwd", "stack_bytes": 0, "instructions": 5}, {"name": "bwd", "stack_bytes": spilled})
        return make_receipt(plan, block, arm, kernels=rows)

    variant = judged(exact_spec("kernel_stack_bytes", "0%", None), receipt)
    assert variant.verdict is VerdictWord.WORSE
    assert "from 0 (0 -> 16 bytes per thread)" in variant.reason
    assert variant.exact is not None
    assert variant.exact.model_validate_json(variant.exact.model_dump_json()) == variant.exact
    assert judged(exact_spec("kernel_instructions", "0%", None), receipt).exact is None, "one row does not say"


def test_random_values_are_called_by_the_definition() -> None:
    """An oracle in whole numbers over many random designs: margin 3 %, two seeds, sometimes a repeat that differs."""
    rng = random.Random(20261122)  # noqa: S311
    seen: Counter[VerdictWord] = Counter()
    for _ in range(300):
        values, differs = _random_values(rng)
        variant = of_memory(lambda arm, seed, block, values=values: values[arm, seed, block], margin="3%")  # type: ignore[misc]
        words = {_expected(values[VARIANT, seed, seed - 1]) for seed in (1, 2)}
        expected = VerdictWord.INCONCLUSIVE if differs or len(words) > 1 else words.pop()
        assert variant.verdict is expected, values
        seen[expected] += 1
    assert len(seen) == 4
    assert min(seen.values()) > 20


def _random_values(rng: random.Random) -> tuple[dict[tuple[str, int, int], int], bool]:
    """Return values by arm, seed and block, and whether one repeat differs by a byte."""
    factors = [rng.choice([0.9, 0.97, 1.0, 1.03, 1.5]) if rng.random() < 0.3 else rng.uniform(0.94, 1.06) for _ in "12"]
    if rng.random() < 0.6:
        factors[1] = factors[0]
    differs, broken = rng.random() < 0.2, (rng.randrange(4), rng.choice(["baseline", VARIANT]))
    return {
        (arm, seed, block): 2 * round(BASE / 2 * (factors[seed - 1] if arm == VARIANT else 1))
        + 2 * (differs and (block, arm) == broken)
        for arm in ("baseline", VARIANT)
        for seed in (1, 2)
        for block in range(4)
    }, differs


def _expected(own: int) -> VerdictWord:
    change = 100 * (own - BASE)
    if abs(change) <= 3 * BASE:
        return VerdictWord.SAME
    return VerdictWord.BETTER if change < 0 else VerdictWord.WORSE


@pytest.mark.parametrize("metric", [name for name in EXACT_METRICS if METRICS[name].source == "training"])
def test_every_exact_metric_is_planned_from_two_blocks_on(metric: str) -> None:
    directed = METRICS[metric].kind != "loss"
    design = {"design__blocks": {"count": 2}, "design__seeds": [1]}
    spec = exact_spec(metric, "1%" if directed else "0%", None, placement={"node_class": "h200"}, **design)
    plan = make_plan(spec)
    assert (len(plan.blocks), plan.mde_pct_per_sd_pct) == (2, None)


@pytest.mark.parametrize("entry", NODE_CLASSES.values(), ids=str)
@pytest.mark.parametrize("metric", ["peak_reserved_gib", "peak_allocated_gib"])
def test_a_resident_set_decides_nowhere_and_tensors_wherever_they_are_counted(metric: str, entry: NodeClass) -> None:
    inexact = {("peak_reserved_gib", "cpu"), ("peak_reserved_gib", "xla-cpu"), ("peak_allocated_gib", "xla-cpu")}
    problems = _problems_of(exact_spec(metric, placement={"node_class": entry.name}, variants=ROWS))
    about_memory = [problem for problem in problems if "resident set of the process" in problem.detail]
    assert bool(about_memory) == ((metric, entry.name) in inexact)
    if entry.name == "cpu" and about_memory:
        assert about_memory[0].pointer == "#/verdict/primary/metric"
        assert about_memory[0].hint == "metrics that can decide there: peak_allocated_gib"


@pytest.mark.parametrize("entry", NODE_CLASSES.values(), ids=str)
@pytest.mark.parametrize("metric", ["peak_reserved_gib", "peak_allocated_gib"])
def test_a_resident_set_may_have_a_budget_and_is_held_against_no_other_one(metric: str, entry: NodeClass) -> None:
    on = {"placement": {"node_class": entry.name}, "variants": ROWS}
    delta, budget = (
        _problems_of(exact_spec("loss_step1", "0%", None, verdict__require=[{"metric": metric, bound: 1}], **on))
        for bound in ("max_delta", "max_value")
    )
    about_memory = [problem for problem in delta if "resident set of the process" in problem.detail]
    assert bool(about_memory) == is_resident(metric, entry)
    assert not [problem for problem in budget if "resident set" in problem.detail]
    if entry.name == "cpu" and about_memory:
        assert about_memory[0].pointer == "#/verdict/require/0/max_delta"
        assert "use metric peak_allocated_gib or max_value" in about_memory[0].hint


@pytest.mark.parametrize("node_class", ["cpu", "h200"])
@pytest.mark.parametrize("metric", ["peak_reserved_gib", "peak_allocated_gib"])
def test_only_a_budget_without_noise_rejects_whatever_else_was_found(metric: str, node_class: str) -> None:
    require = [{"metric": metric, "max_value": 0.01}]
    spec = make_spec(verdict__require=require, placement={"node_class": node_class})
    plan = make_plan(spec)
    variant = judge(plan, spec, make_receipts(plan, sd=0.05), UNCALIBRATED).variants[0]
    (result,) = variant.requirements
    inexact = (metric, node_class) == ("peak_reserved_gib", "cpu")
    assert (result.passed, result.exact) == (False, not inexact)
    assert variant.decision is (Decision.INCONCLUSIVE if inexact else Decision.REJECT)
    assert variant.reason.startswith(f"{metric} max_value") is not inexact


def _problems_of(spec: AblationSpec) -> Sequence[SpecProblem]:
    try:
        make_plan(spec)
    except SpecError as error:
        return error.problems
    return ()


def test_repeats_that_differ_are_told_in_digits_that_tell_them_apart() -> None:
    values = {0.3402290344238281: [0, 2], 0.3385505676269531: [1, 3]}
    assert _distinct(list(values)) == {0.3402290344238281: "0.340229", 0.3385505676269531: "0.338551"}
    rng = random.Random(5)  # noqa: S311
    for _ in range(300):
        base = rng.uniform(1e-3, 1e12)
        close = [base, base * (1 + rng.choice([1e-3, 1e-8, 1e-12])), base * (1 + 1e-15)]
        shown = _distinct(list(dict.fromkeys(close)))
        assert len(set(shown.values())) == len(shown) == len(set(close))


def test_a_seed_without_a_repeat_is_refused_before_anything_runs() -> None:
    with pytest.raises(SpecError) as caught:
        make_plan(exact_spec(design__seeds=[1, 2, 3]))
    (problem,) = caught.value.problems
    assert (problem.pointer, problem.hint) == ("#/design/blocks", "use at least 6 blocks, or fewer seeds")
