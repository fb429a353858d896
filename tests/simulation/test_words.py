"""The simulation's words are the judge's: the same times, once as arrays and once as receipts, say the same."""

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.noise.calibrate import calibrate
from ablate.experiments.analysis.verdicts import Cause, VariantVerdict
from ablate.experiments.design.plan import BlockPlan, Plan
from ablate.experiments.design.power import alpha_of
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.outcomes import FailureClass, VerdictWord
from ablate.experiments.records.calibration import Calibration
from ablate.experiments.records.circumstances import Admission, AttemptRecord, Circumstances
from ablate.experiments.records.receipts import Receipt
from ablate.model.measurements import Step
from tests.calibrations import KEY, make_block
from tests.factories import clocked, make_plan, make_receipt, make_spec
from tests.simulation import draws
from tests.simulation.cases import NOISES, Crashes, Drawing, Stalls, noisy
from tests.simulation.noise import STEPS, Draw
from tests.simulation.words import Words, windows_of, words_of

GATES = [{"chunk_size": size} for size in (8, 32, 64, 128)]
STEP_S = 0.04
CASES: dict[str, Drawing] = {
    **{name: noisy(name) for name in NOISES},
    "stalls": Stalls(stalls=1.0, faster=0.02),
    "crashes": Crashes(slow=0.05, chance=0.1),
    "preempted": Crashes(slow=0.05, chance=0.05, preempted=True),
}


@lru_cache
def planned(blocks: int, variants: int, seed: int) -> tuple[AblationSpec, Plan]:
    spec = make_spec(
        variants={f"v{index}": {"gates": GATES[index]} for index in range(variants)},
        workload__steps={"warmup": 1, "timed": STEPS, "val_rows": 2},
        design={"seeds": [1], "blocks": {"count": blocks}, "order_seed": seed},
    )
    return spec, make_plan(spec)


def receipts_of(draw: Draw, repetition: int, plan: Plan) -> list[Receipt]:
    """Return receipts whose timed steps take what the draw says, in the plan's own running orders."""
    names = [arm.name for arm in plan.arms]
    receipts = []
    for block in plan.blocks:
        for index, name in enumerate(names):
            assert block.order.index(name) == draw.places[repetition, block.index, index]
            receipts.append(
                make_receipt(
                    plan,
                    block,
                    name,
                    steps=timed(plan, draw.seconds[repetition, block.index, index]),
                    started_at=_started(block, name),
                )
            )
    return receipts


def _started(block: BlockPlan, name: str) -> str:
    """Return a start that leaves no pause between trials, which have a wall time of a minute at most."""
    place = len(block.order) * block.index + block.order.index(name)
    return (datetime(2026, 11, 26, tzinfo=UTC) + timedelta(seconds=60 * place)).isoformat()


def timed(plan: Plan, seconds: Any) -> tuple[Step, ...]:
    config = plan.baseline.config
    tokens = config.tokens_per_step
    first = [("compile", 0.1), ("warmup", STEP_S)]
    return clocked(
        [
            Step(  # type: ignore[arg-type]
                index=i, phase=phase, seconds=float(s), began_s=0.0, ended_s=0.0, tokens=tokens, loss=8.0, grad_norm=1.0
            )
            for i, (phase, s) in enumerate([*first, *(("timed", STEP_S * s) for s in seconds)])
        ],
        load_s=config.steps.warmup_s,
    )


def attempts_of(draw: Draw, repetition: int, plan: Plan) -> tuple[AttemptRecord, ...]:
    cut = np.zeros_like(draw.rerun) if draw.cut is None else draw.cut
    return tuple(
        AttemptRecord(
            block_index=0,
            number=1,
            failure_class=failure,
            arm=arm.name,
            message="gone",
            node="n",
            vanished=failure is FailureClass.INFRA_NODE,
        )
        for failure, numbers in ((FailureClass.INFRA_NODE, draw.rerun), (FailureClass.PREEMPTED, cut))
        for arm, number in zip(plan.arms, numbers[repetition], strict=True)
        for _ in range(int(number))
    )


def calibrated(draw: Draw, repetition: int) -> Calibration:
    """Return the calibration of the drawn A/A blocks."""
    assert draw.aa is not None
    assert draw.aa_places is not None
    drawn = zip(draw.aa[repetition], draw.aa_places[repetition], strict=True)
    return calibrate(KEY, [make_block(i, difference=float(d), place=int(place)) for i, (d, place) in enumerate(drawn)])


WORDS: dict[VerdictWord, Callable[[Words], Any]] = {
    VerdictWord.BETTER: lambda words: words.better,
    VerdictWord.WORSE: lambda words: words.worse,
    VerdictWord.SAME: lambda words: words.same,
}


def check(variant: VariantVerdict, words: Words, at: tuple[int, int]) -> None:
    named_verdicts = {verdict for verdict, read in WORDS.items() if read(words)[at]}
    assert named_verdicts == ({variant.verdict} & set(WORDS))
    assert bool(words.stalls[at]) is (variant.cause is Cause.STALLS)
    if variant.cause in (Cause.SPREADS, Cause.RERUNS, Cause.NOISE, Cause.CARRY_OVER):
        assert words.withheld[at]
    if variant.cause is Cause.NOT_PROVED:
        assert not words.withheld[at]
    assert variant.primary is not None
    ours = (variant.primary.delta_pct, variant.primary.ci_low_pct, variant.primary.ci_high_pct)
    theirs = [100 * math.expm1(float(part[at])) for part in (words.estimate, words.low, words.high)]
    assert ours == pytest.approx(theirs, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("blocks", "variants"), [(6, 4), (10, 2), (20, 1)])
def test_arrays_and_receipts_say_the_same(case: str, blocks: int, variants: int) -> None:
    repetitions, effect = 2, np.log1p(np.linspace(0, 0.012, variants))
    drawn = CASES[case](np.random.default_rng(blocks), repetitions, blocks, variants + 1)
    seconds = drawn.seconds.copy()
    seconds[:, :, 1:] *= np.exp(-effect)[:, None]
    draw = replace(drawn, seconds=seconds)
    words = words_of(windows_of(draw), alpha=alpha_of(1), margin_pct=0.5, effects=np.zeros(variants))
    for repetition in range(repetitions):
        spec, plan = planned(blocks, variants, repetition)
        admission = Admission(refused_because=None, calibrations=(calibrated(draw, repetition),))
        known = Circumstances(admission=admission, attempts=attempts_of(draw, repetition, plan))
        verdict = judge(plan, spec, receipts_of(draw, repetition, plan), known)
        for index, variant in enumerate(verdict.variants):
            check(variant, words, (repetition, index))


def test_an_effect_on_all_steps_may_be_added_to_d() -> None:
    draw = noisy("normal")(np.random.default_rng(1), 50, 6, 3)
    effects = np.log1p(np.array([0.01, -0.02]))
    seconds = draw.seconds.copy()
    seconds[:, :, 1:] *= np.exp(-effects)[:, None]
    levels = {"alpha": 0.04, "margin_pct": 0.5}
    added = words_of(windows_of(draw), effects=effects, **levels)
    timed_so = words_of(
        windows_of(replace(draw, seconds=seconds)),
        effects=np.zeros(2),
        **levels,
    )
    assert added.estimate == pytest.approx(timed_so.estimate)
    for name in ("better", "worse", "same", "stalls", "withheld"):
        assert (getattr(added, name) == getattr(timed_so, name)).all()


def test_the_effect_of_stalls_is_that_of_many_draws() -> None:
    case = Stalls(stalls=2.0, faster=0.015)
    windows = windows_of(case(np.random.default_rng(0), 400, 10, 2))
    assert 100 * math.expm1(windows.d.mean()) == pytest.approx(case.effect_pct, abs=0.3)
    assert draws.true_effect_of_stalls(stalls=0.0, faster=0.015) == pytest.approx(0.015)
