"""Windows of commands beside the worker's clock and beside the whole process, over drawn seconds."""

import math
import random
import re
import statistics
from typing import Any, TypeAlias

import pytest
import scipy.stats

from ablate.experiments.analysis.evidence import Evidence, WholeBlocks, evidence_of
from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.programs import clocks_apart, program_notes
from ablate.experiments.analysis.verdicts import Cause
from ablate.experiments.outcomes import VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED
from ablate.experiments.records.receipts import Receipt
from tests.program_receipts import plan_of, program_receipt

Row: TypeAlias = tuple[float, float, float | None]
"""Seconds of a trial: the window, the window by the worker's clock, the process."""

PRIMARY = {"metric": "tokens_per_s", "margin": "0.5%", "adopt_if": "1.5%"}
SPEC, PLAN = plan_of(workload__metrics={}, verdict__primary=PRIMARY)
STEPS = 4
MOVED, ENDED = "inside of the window", "had to be ended"


def trial(block: int, arm: str, row: Row) -> Receipt:
    changes = {"reported": {}, "step_s": row[0] / STEPS}
    made = program_receipt(PLAN, PLAN.blocks[block], arm, **changes)
    report = made.program and made.program.model_copy(update={"window_seen_s": row[1]})
    return program_receipt(PLAN, PLAN.blocks[block], arm, **changes, program=report, process_s=row[2])


def receipts_of(baseline: list[Row], variant: list[Row]) -> list[Receipt]:
    arms = {PLAN.baseline.name: baseline, PLAN.variants[0].name: variant}
    return [trial(block, arm, row) for arm, rows in arms.items() for block, row in enumerate(rows)]


def evidence(baseline: list[Row], variant: list[Row]) -> Evidence:
    return evidence_of(PLAN.variants[0], WholeBlocks(PLAN, receipts_of(baseline, variant)))


def drawn_arms(rng: random.Random) -> tuple[list[Row], list[Row]]:
    """Return the trials of both arms: how much faster, how much of it moved, and what is lost differ widely."""
    scale, gain = 10 ** rng.uniform(-2, 3), rng.choice([0.01, 0.5, 0.97, 1.0, 1.03])
    lag, noise = rng.choice([0.0, 0.0019, -0.0019, 0.0001]), 10 ** rng.uniform(-4, -1)
    moved, lost = rng.choice([-0.5, 0.0, 0.45, 0.55, 1.0, 1.5]), rng.choice([0.0, 0.0, 0.3, 1.0])
    baseline, variant = [], []
    for _ in PLAN.blocks:
        base, own = scale * math.exp(rng.gauss(0, noise)), scale * gain * math.exp(rng.gauss(0, noise))
        outside = 3.0 + moved * (base - own) + rng.gauss(0, scale * noise)
        baseline.append((base, base + rng.uniform(-1e-4, 1e-4), base + 3.0 if rng.random() < 0.9 else None))
        variant.append((own, max(own / 2, own + lag), None if rng.random() < lost else own + outside))
    return baseline, variant


@pytest.mark.parametrize("margin_pct", [0.0, 0.5, 5.0])
def test_an_effect_that_the_workers_clock_contradicts_by_more_than_the_margin_is_said(margin_pct: float) -> None:
    rng, num_named = random.Random(7), 0  # noqa: S311 - draws that repeat
    for _ in range(100):
        baseline, variant = drawn_arms(rng)
        both = list(zip(baseline, variant, strict=True))
        by_program = statistics.fmean(math.log(own[0] / base[0]) for base, own in both)
        by_worker = statistics.fmean(math.log(own[1] / base[1]) for base, own in both)
        gap = 100 * (math.exp(by_worker - by_program) - 1)
        text = clocks_apart(evidence(baseline, variant), "tokens_per_s", margin_pct)
        assert (text is not None) == (abs(gap) > max(margin_pct, 0.1))
        assert text is None or f"{gap:+.2f} % longer" in text
        assert clocks_apart(evidence(baseline, variant), "process_s", margin_pct) is None
        num_named += text is not None
    assert 2 <= num_named <= 95


@pytest.mark.parametrize(("seen_s", "cause"), [(0.16, None), (0.1605, None), (0.162, Cause.CLOCKS)])
def test_clocks_that_differ_take_the_answer(seen_s: float, cause: Cause | None) -> None:
    baseline = [(0.2 + block / 1e4, 0.2 + block / 1e4, None) for block in range(6)]
    variant = [(0.16 + block / 1e4, seen_s + block / 1e4, None) for block in range(6)]
    (answer,) = judge(PLAN, SPEC, receipts_of(baseline, variant), CALIBRATED).variants
    assert (answer.measured, answer.cause) == (VerdictWord.BETTER, cause)
    assert answer.verdict is (VerdictWord.BETTER if cause is None else VerdictWord.INCONCLUSIVE)


def proved(values: list[float]) -> bool:
    return len(values) > 1 and bool(scipy.stats.ttest_1samp(values, 0.0, alternative="greater").pvalue < 0.05)


def test_a_gain_that_is_paid_outside_of_the_window_is_said() -> None:
    rng, num_named = random.Random(8), 0  # noqa: S311 - draws that repeat
    for _ in range(200):
        baseline, variant = drawn_arms(rng)
        whole = [(b, v) for b, v in zip(baseline, variant, strict=True) if b[2] is not None and v[2] is not None]
        gains = [b[0] - v[0] for b, v in whole]
        costs = [(v[2] - v[0]) - (b[2] - b[0]) for b, v in whole]  # type: ignore[operator]
        is_paid = proved(gains) and proved([cost - gain / 2 for cost, gain in zip(costs, gains, strict=True)])
        notes = list(program_notes(evidence(baseline, variant), "tokens_per_s"))
        moved = [note for note in notes if MOVED in note]
        assert len(moved) == is_paid, notes
        num_named += len(moved)
        ended = sum(row[2] is None for row in variant) if any(row[2] is not None for row in baseline) else 0
        assert [note for note in notes if ENDED in note] == (
            [f"processes of the variant still ran at the end of {ended} of its 6 trials, and had to be ended: "
             "their work is in no number"]
            if ended
            else []
        )  # fmt: skip
        whole_process = list(program_notes(evidence(baseline, variant), "process_s"))
        assert not any(MOVED in note or ENDED in note for note in whole_process)
    assert 10 < num_named < 150


def noted(own: list[dict[str, Any]], base: list[dict[str, Any]], load: float | None) -> list[str]:
    receipts = receipts_of([(0.2, 0.2, None)] * 6, [(0.2, 0.2, None)] * 6)
    changed = []
    for receipt in receipts:
        changes = (base if receipt.arm == PLAN.baseline.name else own)[receipt.ids.block_index]
        report = receipt.program and receipt.program.model_copy(update=changes)
        environment = receipt.environment.model_copy(update={"foreign_load": load})
        changed.append(receipt.model_copy(update={"program": report, "environment": environment}))
    evidence = evidence_of(PLAN.variants[0], WholeBlocks(PLAN, changed))
    return [note for note in program_notes(evidence, "tokens_per_s") if re.search("data| J |energy", note)]


@pytest.mark.parametrize("of", ["GPUs", "processor packages"])
@pytest.mark.parametrize("load", [0.0, 0.02, 0.021, None])
def test_energy_is_said_by_token_and_not_where_others_share_the_counter(of: str, load: float | None) -> None:
    rng = random.Random(3)  # noqa: S311 - draws that repeat
    own, base = ([{"energy_j": rng.uniform(1, 100), "energy_of": of} for _ in range(6)] for _ in range(2))
    numbers = [[float(one["energy_j"]) / (100 * STEPS) for one in arm] for arm in (own, base)]
    shown = [f"{statistics.fmean(arm):.3g} ({min(arm):.3g} to {max(arm):.3g})" for arm in numbers]
    more = ", with everything that ran on them" if of == "processor packages" else ""
    expected = f"the {of} used {shown[0]} J a token in its windows, {shown[1]} in the baseline's (mean, range{more})"
    if of == "processor packages" and (load is None or load > 0.02):
        why = "others took more than 2% of the cores' time, or nobody knows"
        expected = f"the energy of the {of} is not shown: {why}"
    assert noted(own, base, load) == [expected]
    assert noted([*own[:5], {}], base, load) == [], "a trial without a number"
    assert noted([{}] * 6, [{}] * 6, load) == []


def test_waits_for_data_are_said_as_a_part_of_the_windows() -> None:
    own, base = [{"loading_s": 0.02}, *[{"loading_s": 0.05}] * 5], [{"loading_s": 0.1}] * 6
    assert noted(own, base, 0.0) == ["it waited for data in 22.5% of its windows, the baseline in 50.0% (means)"]
    assert noted([{}] * 6, base, 0.0) == [
        "it waited for data in an unknown part of its windows, the baseline in 50.0% (means)"
    ]
