"""Variants against each other: estimates against scipy on the rates themselves, and which pairs there are."""

import io
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.outcomes import Outcome
from ablate.experiments.records.circumstances import CALIBRATED
from ablate.experiments.reporting.between import MOST_VARIANTS, between_variants
from ablate.experiments.reporting.pages.report import render
from ablate.experiments.reporting.terminal.markdown import verdict_markdown
from ablate.experiments.reporting.verdict_layout import lay_out, short_answer
from ablate.service.cli import verdict_tables
from tests import views
from tests.factories import make_plan, make_receipts, spec_values


def judged(seed: int, **changes: Any) -> tuple[Verdict, dict[str, list[float]]]:
    """Return a verdict on drawn rates, and the rates by arm, in the order of the blocks."""
    chance = random.Random(seed)  # noqa: S311
    count = chance.randint(1, 8)
    variants = {
        f"v{place}": {"gates": {"chunk_size": 32}, "overrides": {"learning_rate": 1e-4 * (place + 1)}}
        for place in range(count)
    }
    values = spec_values(variants=variants, design__blocks={"count": chance.randint(6, 24)}, **changes)
    plan = make_plan(AblationSpec.model_validate(values))
    speeds = {arm.name: math.exp(chance.gauss(0, 0.05)) for arm in plan.arms}
    receipts = make_receipts(plan, speeds, sd=10 ** chance.uniform(-5, -1), seed=seed)
    rates: dict[str, list[float]] = {}
    for receipt in sorted(receipts, key=lambda one: one.ids.block_index):
        assert receipt.summary is not None
        rates.setdefault(receipt.arm, []).append(receipt.summary.tokens_per_s)
    return judge(plan, AblationSpec.model_validate(values), receipts, CALIBRATED), rates


@pytest.mark.parametrize("seed", range(15))
def test_each_pair_has_the_paired_t_interval_of_its_rates(seed: int) -> None:
    verdict, rates = judged(seed)
    layout = lay_out(verdict)
    arms = [one.arm for one in layout.variants]
    comparable = [v.arm for v in verdict.variants if v.primary is not None and v.other_work is None]
    shown = [arm for arm in arms if arm in comparable][:MOST_VARIANTS]
    assert [(one[0].text, one[1].text) for one in between_variants(verdict).rows] == list(
        itertools.combinations(shown, 2)
    )
    widened = {v.arm: v.primary.widened for v in verdict.variants if v.primary}
    for one, other, effect, interval, blocks in between_variants(verdict).rows:
        apart = np.log(rates[one.text]) - np.log(rates[other.text])
        mean, half = (
            apart.mean(),
            stats.t.ppf(0.975, len(apart) - 1) * stats.sem(apart) * max(widened[one.text], widened[other.text]),
        )
        expected = [100 * np.expm1(value) for value in (mean, mean - half, mean + half)]
        given = [effect.numbers["difference_pct"], interval.numbers["low_pct"], interval.numbers["high_pct"]]
        assert np.allclose(given, expected, rtol=1e-6, atol=1e-9)
        assert blocks.text == str(len(apart))


def test_a_pair_is_labelled_and_one_that_lacks_a_trial_is_left_out() -> None:
    view = views.view(num_blocks=8, timed=4)
    assert view.verdict is not None
    rows = between_variants(view.verdict).rows
    assert len(rows) >= 1
    page = render(view)
    assert "Variants against each other: exploratory" in page
    assert "Not planned and not judged" in page
    arm = rows[0][0].text
    short = view.verdict.arms[arm].model_copy(update={"outcomes": {"measured": 7, Outcome.OOM.value: 1}})
    missing = view.verdict.model_copy(update={"arms": {**view.verdict.arms, arm: short}})
    assert all(arm not in (one[0].text, one[1].text) for one in between_variants(missing).rows)


@pytest.mark.parametrize("blocks", [1, 2, 13, 20])
def test_an_a_a_ablation_says_its_noise_whatever_its_verdict_is(blocks: int) -> None:
    values = spec_values(
        variants={"repeat": {"gates": {"chunk_size": 16}}}, purpose="calibration", design__blocks={"count": 20}
    )
    spec = AblationSpec.model_validate(values)
    plan = make_plan(spec)
    receipts = make_receipts(plan, sd=0.01, seed=3)
    first = [one for one in receipts if one.ids.block_index < blocks]
    verdict = judge(plan, spec, first, CALIBRATED)
    rates = {(one.ids.block_index, one.arm): one.summary.tokens_per_s for one in first if one.summary}
    apart = [math.log(rates[index, "repeat"] / rates[index, "baseline"]) for index in range(blocks)]
    assert verdict.own_noise is not None
    assert verdict.own_noise.blocks == blocks
    lead = lay_out(verdict).lead
    assert lead.startswith(f"{blocks} of 20 A/A blocks count; ")
    assert "No valid comparison" not in lead
    if blocks > 1:
        assert verdict.own_noise.sd_pct == pytest.approx(100 * np.std(apart, ddof=1))
    assert short_answer(verdict) == lead.removesuffix(".")
    assert lead in verdict_markdown(verdict)
    console = Console(width=200, file=io.StringIO(), force_terminal=False)
    console.print(verdict_tables.verdict(verdict))
    assert lead in console.file.getvalue()  # type: ignore[attr-defined]
