"""Variants that do other work, or are another numerical model, through the judge: what is said, and what never is."""

import random
from typing import Any

import pytest

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.looks import at_look
from ablate.experiments.analysis.verdicts import Cause, VariantVerdict, Verdict
from ablate.experiments.design.rule import rule_of
from ablate.experiments.outcomes import Decision, VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED
from ablate.experiments.reporting.pages.circumstance_tables import rule_in_words
from ablate.experiments.reporting.terminal.markdown import verdict_markdown
from ablate.experiments.reporting.verdict_layout import lay_out
from ablate.service.web.answers import read_answer
from tests.factories import GIB, make_plan, make_receipt, make_receipts, make_spec
from tests.program_receipts import program_receipt, program_spec

GATES: dict[str, tuple[Any, ...]] = {
    "micro_batch": (1, 2, 4),
    "dtype": ("float32", "bfloat16"),
    "chunk_size": (8, 16, 32),
    "psiv_cache": (False, True),
}
DEFAULTS = {"micro_batch": 2, "dtype": "float32", "chunk_size": 16, "psiv_cache": False}
PER_STEP = ("step_s", "peak_allocated_gib")
PRIMARIES = (*PER_STEP, "tokens_per_s", "model_tflops_per_s")


@pytest.fixture(autouse=True)
def _plans_of_earlier_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan arms that no metric compares: earlier code did, and only the receipts of commands show their work."""
    monkeypatch.setattr("ablate.experiments.design.checks._comparison_problems", lambda _spec, _arms: ())


def judged(
    variant: dict[str, Any], metric: str, *, require: tuple[dict[str, Any], ...] = (), better: bool = True
) -> Verdict:
    """Judge a variant that is 30 % better or worse by `metric`, beside one that differs by its schedule alone."""
    spec = make_spec(
        variants={"asked": {"gates": variant}, "plain": {"gates": {"chunk_size": 64}}},
        verdict__primary={"metric": metric, "margin": "1%", "adopt_if": "5%"},
        verdict__require=list(require),
    )
    plan, factor = make_plan(spec), 1.3 if better else 0.7
    rows = variant.get("micro_batch", 2) / 2
    speed = 5000.0 * (factor * (rows if metric == "step_s" else 1))
    noise = random.Random(1)  # noqa: S311  # not for secrets
    receipts = [
        make_receipt(
            plan,
            block,
            arm,
            tokens_per_s=(speed if arm == "asked" else 5000.0) * (1 + 1e-3 * noise.random()),
            peak_bytes=round(GIB / factor) if arm == "asked" else GIB,
        )
        for block in plan.blocks
        for arm in block.order
    ]
    return judge(plan, spec, receipts, CALIBRATED)


def asked(verdict: Verdict) -> VariantVerdict:
    return next(one for one in verdict.variants if one.arm == "asked")


@pytest.mark.parametrize("seed", range(40))
def test_a_variant_is_adopted_where_like_is_compared_with_like_and_else_its_confound_is_said(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  # not for secrets
    names = chance.sample(sorted(GATES), chance.randint(1, 4))
    gates = {name: chance.choice([v for v in GATES[name] if v != DEFAULTS[name]]) for name in names}
    metric, better = chance.choice(PRIMARIES), chance.random() < 0.7
    verdict = judged(gates, metric, better=better)
    variant, lead = asked(verdict), lay_out(verdict).lead
    measured = VerdictWord.BETTER if better else VerdictWord.WORSE
    assert variant.measured is measured
    if "micro_batch" in gates and metric in PER_STEP:
        assert (variant.verdict, variant.cause) == (VerdictWord.INCONCLUSIVE, Cause.OTHER_WORK)
        assert variant.decision is Decision.INCONCLUSIVE
        tokens = 256 * gates["micro_batch"]
        assert f"for asked (other work: a step has {tokens:,} tokens, the baseline's 512)" in lead
        assert "dopt asked" not in lead
        return
    assert (variant.verdict, variant.cause, variant.other_work) == (measured, None, None)
    assert variant.decision is (Decision.ADOPT if better else Decision.REJECT)
    model = [name for name in ("micro_batch", "dtype") if name in gates]
    assert bool(variant.other_model) == bool(model)
    if better:
        for name in model:
            assert f"{name} {gates[name]} instead of {DEFAULTS[name]}" in lead
        assert ("losses not compared" in lead) == bool(model)


def test_other_work_is_said_wherever_the_answer_is() -> None:
    verdict = judged({"micro_batch": 1}, "peak_allocated_gib")
    other = "a step has 256 tokens, the baseline's 512"
    line = next(one for one in read_answer(verdict.model_dump_json()).variants if one.arm == "asked")
    texts = (lay_out(verdict).lead, line.headline, verdict_markdown(verdict), str(asked(verdict).reason))
    assert [other in text for text in texts] == [True] * 4
    assert (line.word.text, line.word.tone) == ("inconclusive", "open")
    assert "peak allocated memory 23.08" in line.headline
    assert [one.arm for one in lay_out(verdict).variants] == ["plain", "asked"], (
        "the best comes first, of what compares"
    )


def test_losses_that_were_compared_are_not_called_missing() -> None:
    bound = ({"metric": "loss_val", "max_delta": 0.1},)
    laid_out = lay_out(judged({"dtype": "bfloat16"}, "tokens_per_s", require=bound))
    lead = laid_out.lead
    assert "adopt asked (trains differently: dtype bfloat16 instead of float32)" in lead.replace("Adopt", "adopt")
    line = next(one for one in laid_out.variants if one.arm == "asked")
    assert not [remark for remark in line.remarks if "not_worse_by" in remark], "the spec has it"
    without = next(one for one in lay_out(judged({"dtype": "bfloat16"}, "tokens_per_s")).variants if one.arm == "asked")
    assert [remark for remark in without.remarks if "not_worse_by" in remark]


def test_a_requirement_rejects_other_work_too() -> None:
    variant = asked(
        judged({"micro_batch": 4}, "step_s", require=({"metric": "peak_allocated_gib", "max_value": 0.01},))
    )
    assert (variant.verdict, variant.decision) == (VerdictWord.INCONCLUSIVE, Decision.REJECT)


def test_an_arm_that_did_not_end_is_told_as_that() -> None:
    spec = make_spec(variants={"rows": {"gates": {"micro_batch": 4}}}, verdict__primary__metric="step_s")
    plan = make_plan(spec)
    receipts = [
        make_receipt(plan, b, a, **({"outcome": "oom"} if a == "rows" else {})) for b in plan.blocks for a in b.order
    ]
    (variant,) = judge(plan, spec, receipts, CALIBRATED).variants
    assert (variant.verdict, variant.cause, variant.decision) == (VerdictWord.OOM, None, Decision.REJECT)


def test_no_more_blocks_run_for_a_variant_that_cannot_be_compared() -> None:
    blocks = {"looks": [6, 12]}
    spec = make_spec(
        variants={"rows": {"gates": {"micro_batch": 4}}}, verdict__primary__metric="step_s", design__blocks=blocks
    )
    plan = make_plan(spec)
    look = at_look(plan, spec, make_receipts(plan, {"rows": 2.0}, sd=0.3), CALIBRATED, 0)
    assert not look.go_on


@pytest.mark.parametrize(("equal", "verdict"), [("steps", VerdictWord.INCONCLUSIVE), ("tokens", VerdictWord.BETTER)])
def test_a_loss_after_other_tokens_has_no_verdict(equal: str, verdict: VerdictWord) -> None:
    spec = make_spec(
        variants={"rows": {"gates": {"micro_batch": 4}}},
        workload__steps__equal=equal,
        design={"seeds": 6, "blocks": {"count": 6}},
        verdict__primary={"metric": "loss_val", "margin": "1%"},
    )
    plan = make_plan(spec)
    noise = random.Random(1)  # noqa: S311  # not for secrets
    receipts = [
        make_receipt(plan, block, arm, loss_val=(5.0 if arm == "rows" else 7.0) + 0.01 * noise.random())
        for block in plan.blocks
        for arm in block.order
    ]
    (variant,) = judge(plan, spec, receipts, CALIBRATED).variants
    assert (variant.verdict, variant.measured) == (verdict, VerdictWord.BETTER)
    assert (variant.cause is Cause.OTHER_WORK) == (verdict is VerdictWord.INCONCLUSIVE)
    other = "it trains on 6,144 tokens, the baseline on 3,072"
    assert variant.other_work == (other if equal == "steps" else None)


def test_a_loss_of_commands_after_other_tokens_has_no_verdict() -> None:
    rule = {
        "primary": {"metric": "loss_final", "margin": "1%"},
        "require": [{"metric": "loss_step1", "not_worse_by": 0.1}],
    }
    spec = program_spec(verdict=rule, design__seeds=[1, 2, 3, 4, 5, 6])
    plan = make_plan(spec)
    receipts = []
    for block, arm in ((one, arm) for one in plan.blocks for arm in one.order):
        made = program_receipt(plan, block, arm, reported={})
        tokens = 100 if arm == plan.baseline.name else 200
        steps = tuple(step.model_copy(update={"tokens": tokens}) for step in made.steps)
        receipts.append(made.model_copy(update={"steps": steps}))
    variant = judge(plan, spec, receipts, CALIBRATED).variants[0]
    assert variant.cause is Cause.OTHER_WORK
    assert "tokens" in str(variant.other_work)
    (required,) = variant.requirements
    assert required.undecided
    assert "not comparable" in required.detail


def test_the_rule_says_so_before_the_first_sample_where_it_can_matter() -> None:
    rows = make_spec(variants={"rows": {"gates": {"micro_batch": 4}}})
    assert "other_work" in rule_of(rows)["comparison"]
    assert "other work" in rule_in_words(rule_of(rows))
    assert "other_work" not in rule_of(make_spec())["comparison"]


def test_a_peak_that_nothing_moved_is_not_taken_for_no_effect() -> None:
    spec = make_spec(verdict__primary={"metric": "peak_allocated_gib", "margin": "1%"})
    plan = make_plan(spec)
    variants = lay_out(judge(plan, spec, make_receipts(plan), CALIBRATED)).variants
    assert [any("The peak is the same to the byte" in remark for remark in one.remarks) for one in variants] == [
        True,
        True,
    ]
    moved = next(
        one for one in lay_out(judged({"psiv_cache": True}, "peak_allocated_gib")).variants if one.arm == "asked"
    )
    assert not any("The peak is the same to the byte" in remark for remark in moved.remarks)
