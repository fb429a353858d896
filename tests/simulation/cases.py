"""Cases: what is simulated, and what of it is counted.

Every case runs at the levels of a first asking. Wrong differences are counted with next to no margin, so that only the
statistics decide; wrong sameness with a true effect of exactly the margin, in every variant.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from experiments.analysis.statistics import Array, log_ratio
from experiments.design.power import alpha_of, level_shares
from tests.simulation import draws, noise
from tests.simulation.noise import Draw
from tests.simulation.rates import Rate, rate
from tests.simulation.words import Windows, first_blocks, windows_of, words_of

BLOCKS = (6, 10, 20)
VARIANTS = (1, 2, 4)
MARGIN_PCT = 0.5
NO_MARGIN_PCT = 1e-4
PLANTED_PCT = 1.0
ASKINGS = 20
LOOKS = (6, 10, 14, 20)
_AT_ONCE = 250

Drawing = Callable[[np.random.Generator, int, int, int], Draw]
"""Random numbers, repetitions, blocks and arms in; ablations without an effect out."""

NOISES: dict[str, noise.TrialNoise] = {
    "normal": noise.normal,
    "5 % of trials ten sd slower": noise.outliers,
    "skewed in all arms": noise.skewed,
    "autocorrelated 0.6": noise.autocorrelated,
    "drift of 1 %": noise.drifting,
    "shared by the block": noise.shared_by_block,
    "first slot 0.5 % slower": noise.first_slot,
    "heavy skew in the variants only": noise.skewed_in_variants,
}


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """What was counted for one kind of noise, number of blocks and number of variants."""

    wrong_difference: Rate
    """At least one better or worse where nothing differs."""
    wrong_same: Rate
    """At least one same where every variant lies at the margin."""
    holds: Rate
    """All intervals hold the truth."""
    found: Rate
    """A planted 1 % in one variant is called better."""
    withheld: Rate
    """That variant's word was withheld because stalls or spreads differ."""


def noisy(name: str) -> Drawing:
    """Return how to draw ablations under a noise of `NOISES`."""
    chosen = NOISES[name]
    return lambda rng, repetitions, blocks, arms: draws.noisy(chosen, rng, repetitions, blocks, arms)


def outcomes(drawing: Drawing, *, blocks: int, variants: int, repetitions: int, seed: int = 0) -> Outcomes:
    """Simulate ablations and count."""
    parts = [_counted(windows) for windows in windows_in_parts(drawing, blocks, variants, repetitions, seed)]
    joined = {name: sum((part[name] for part in parts[1:]), parts[0][name]) for name in parts[0]}
    return Outcomes(**joined)


def windows_in_parts(drawing: Drawing, blocks: int, variants: int, repetitions: int, seed: int) -> list[Windows]:
    """Draw and summarise ablations, some at a time: their steps need memory."""
    rng = np.random.default_rng([seed, blocks, variants])
    sizes = [min(_AT_ONCE, repetitions - start) for start in range(0, repetitions, _AT_ONCE)]
    return [windows_of(drawing(rng, size, blocks, variants + 1)) for size in sizes]


def _counted(windows: Windows) -> dict[str, Rate]:
    variants, alpha = windows.d.shape[1], alpha_of(1)
    none, planted = np.zeros(variants), np.zeros(variants)
    planted[0] = log_ratio(PLANTED_PCT)
    null = words_of(windows, alpha=alpha, margin_pct=NO_MARGIN_PCT, effects=none)
    at_margin = words_of(windows, alpha=alpha, margin_pct=MARGIN_PCT, effects=none + log_ratio(MARGIN_PCT))
    one = words_of(windows, alpha=alpha, margin_pct=MARGIN_PCT, effects=planted)
    return {
        "wrong_difference": rate(null.changed.any(axis=1)),
        "wrong_same": rate(at_margin.same.any(axis=1)),
        "holds": rate(((null.low <= 0) & (null.high >= 0)).all(axis=1)),
        "found": rate(one.better[:, 0]),
        "withheld": rate(one.withheld[:, 0]),
    }


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """Variants whose steps stall: a known effect on the total that the medians do not show."""

    stalls: float
    """Stalled steps of a window, on average."""
    faster: float
    """By how much the other steps are faster, in natural log units."""

    @property
    def effect_pct(self) -> float:
        """Mean effect on throughput."""
        return 100 * math.expm1(draws.true_effect_of_stalls(stalls=self.stalls, faster=self.faster))

    def __call__(self, rng: np.random.Generator, repetitions: int, blocks: int, arms: int) -> Draw:
        """Draw such ablations."""
        return draws.stalling(rng, repetitions, blocks, arms, stalls=self.stalls, faster=self.faster)


@dataclass(frozen=True, kw_only=True)
class Crashes:
    """Variants whose slow trials crash and are run again: a loss that no receipt shows."""

    slow: float
    chance: float

    @property
    def effect_pct(self) -> float:
        """Mean effect on throughput if no trial crashed."""
        return 100 * math.expm1(-self.slow * self.chance)

    def __call__(self, rng: np.random.Generator, repetitions: int, blocks: int, arms: int) -> Draw:
        """Draw such ablations."""
        return draws.crashing(rng, repetitions, blocks, arms, chance=self.chance)


def said(drawing: Drawing, *, blocks: int, repetitions: int, seed: int = 0) -> dict[str, Rate]:
    """Count the words of one variant, its effect being part of the draw."""
    parts = windows_in_parts(drawing, blocks, 1, repetitions, seed)
    found = [words_of(part, alpha=alpha_of(1), margin_pct=MARGIN_PCT, effects=np.zeros(1)) for part in parts]
    flags: Mapping[str, Array] = {
        name: np.concatenate([getattr(words, name)[:, 0] for words in found])
        for name in ("better", "worse", "same", "stalls", "withheld")
    }
    return {name: rate(values) for name, values in flags.items()}


def asked_again(drawing: Drawing, *, blocks: int, repetitions: int, seed: int = 0) -> Rate:
    """Count the questions with at least one `better` in `ASKINGS` ablations, where nothing differs."""
    any_better = np.zeros(repetitions, dtype=np.bool_)
    for number in range(1, ASKINGS + 1):
        parts = windows_in_parts(drawing, blocks, 1, repetitions, seed + number)
        found = [words_of(p, alpha=alpha_of(number), margin_pct=NO_MARGIN_PCT, effects=np.zeros(1)) for p in parts]
        any_better |= np.concatenate([words.better[:, 0] for words in found])
    return rate(any_better)


def with_looks(drawing: Drawing, *, variants: int, repetitions: int, effect_pct: float, seed: int = 0) -> "Looked":
    """Simulate ablations that stop at the first look at which every variant has an answer.

    They never stop for futility, which can only take words away.
    """
    effects = np.full(variants, log_ratio(effect_pct))
    parts = windows_in_parts(drawing, LOOKS[-1], variants, repetitions, seed)
    counted = [_looked(part, effects, NO_MARGIN_PCT if effect_pct == 0 else MARGIN_PCT) for part in parts]
    changed, better, blocks = (np.concatenate(values) for values in zip(*counted, strict=True))
    return Looked(changed=rate(changed), better=rate(better), mean_blocks=float(blocks.mean()))


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What ablations with looks say."""

    changed: Rate
    """At least one better or worse."""
    better: Rate
    """Better for the first variant."""
    mean_blocks: float


def _looked(windows: Windows, effects: Array, margin_pct: float) -> tuple[Array, Array, Array]:
    repetitions = windows.d.shape[0]
    running = np.ones(repetitions, dtype=np.bool_)
    changed, better, blocks = np.zeros((3, repetitions))
    for look, share in zip(LOOKS, level_shares(LOOKS), strict=True):
        part = first_blocks(windows, look)
        words = words_of(part, alpha=alpha_of(1) * share, margin_pct=margin_pct, effects=effects)
        ends = running & (np.all(words.changed | words.same, axis=1) | (look == LOOKS[-1]))
        changed[ends], better[ends] = np.any(words.changed, axis=1)[ends], words.better[ends, 0]
        blocks[ends] = look
        running &= ~ends
    return changed, better, blocks
