"""Runs that never reach a target loss: tokens of whole ablations, judged by the present rule and by two others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ablate.experiments.analysis.answer import word_of
from ablate.experiments.analysis.comparing import Levels, Sample, compare, target_sample
from ablate.experiments.analysis.curves import Reading
from ablate.experiments.analysis.sample_checks import spreads_differ
from ablate.experiments.analysis.statistics import Array
from ablate.experiments.design.power import FEWEST_BLOCKS, alpha_of
from ablate.experiments.design.verdict_rule import Primary
from ablate.experiments.outcomes import VerdictWord
from tests.simulation.rates import Rate, rate

SD = 0.02
"""Of a run's own luck, in natural log units of its tokens."""
SEED_SD = 0.05
"""Of the luck that both runs of a seed share."""
END = float(np.log(1.5))
"""All runs end at one and a half times the tokens that a mean run of the baseline needs."""
MARGIN_PCT = 1.0
_METRIC = "tokens_to_loss"
_RULE = Primary.model_validate({"metric": _METRIC, "margin": "1%", "target": "3 nats"})

Runs: TypeAlias = list[tuple[Reading, Reading]]
"""(variant, baseline) of each seed."""


@dataclass(frozen=True, kw_only=True)
class Arms:
    """How two arms differ."""

    change: float = 0.0
    """Of the variant's tokens where it arrives, in natural log units."""
    never: tuple[float, float] = (0.0, 0.0)
    """Shares of the variant's and of the baseline's runs that never reach the target."""


def drawn(arms: Arms, seeds: int, repetitions: int, seed: int = 0) -> list[Runs]:
    """Draw the tokens of ablations as validation curves would show them."""
    rng = np.random.default_rng([seed, seeds])
    logs = rng.normal(0, SEED_SD, (repetitions, seeds, 1)) + rng.normal(0, SD, (repetitions, seeds, 2))
    logs[..., 0] += arms.change
    never = rng.random(logs.shape) < np.array(arms.never)
    return [[_both(*seed_of) for seed_of in zip(*one, strict=True)] for one in zip(logs, never, strict=True)]


def _both(logs: Array, never: Array) -> tuple[Reading, Reading]:
    own, base = (
        Reading(float(np.exp(min(log, END))), 0.0, censored=int(bad or log > END))
        for log, bad in zip(np.where(never, END, logs), never, strict=True)
    )
    return own, base


def by_ends(runs: Runs) -> VerdictWord:
    """Judge by the present rule: a run that never arrives counts at its end, against its arm's gain."""
    return _word(target_sample(_METRIC, runs, (0,) * len(runs)))


def whole_only(runs: Runs) -> VerdictWord:
    """Judge by the rule until November 2026: no word once a run never arrives."""
    return VerdictWord.INCONCLUSIVE if any(one.censored for pair in runs for one in pair) else by_ends(runs)


def left_out(runs: Runs) -> VerdictWord:
    """Judge the seeds of which both runs arrive, which is a trap."""
    whole = [pair for pair in runs if not any(one.censored for one in pair)]
    return by_ends(whole) if len(whole) >= FEWEST_BLOCKS else VerdictWord.INCONCLUSIVE


RULES: dict[str, Callable[[Runs], VerdictWord]] = {"now": by_ends, "was": whole_only, "left out": left_out}


def _word(sample: Sample | None) -> VerdictWord:
    if sample is None:
        return VerdictWord.INCONCLUSIVE
    levels = Levels(family=1, alphas={"new": alpha_of(1)}, margin_pct=MARGIN_PCT)
    word = word_of(compare(_METRIC, {"new": sample}, levels)["new"], _RULE)
    return VerdictWord.INCONCLUSIVE if spreads_differ(sample, over_seeds=True) else word


def word_rates(arms: Arms, *, seeds: int, repetitions: int, rule: str = "now") -> dict[VerdictWord, Rate]:
    """Return how often a rule says each word."""
    words = [RULES[rule](runs) for runs in drawn(arms, seeds, repetitions)]
    of_numbers = (VerdictWord.BETTER, VerdictWord.SAME, VerdictWord.WORSE)
    return {word: rate([one is word for one in words]) for word in of_numbers}
