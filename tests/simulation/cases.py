"""Cases of the simulation, and the counted verdicts.

Every case runs at the levels of a first asking. Wrong differences are counted with almost no margin, so that only the
statistics decide. Wrong sameness is counted with a true effect of exactly the margin in every variant.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ablate.experiments.analysis.comparing import Sample
from ablate.experiments.analysis.influences import LEVEL, carry_over, node_effects
from ablate.experiments.analysis.requirements import proved
from ablate.experiments.analysis.statistics import Array, fit, log_ratio
from ablate.experiments.design.power import ONE_LOOK, Look, alpha_of, level_shares
from ablate.experiments.design.spec_values import Difference
from tests.simulation import draws, noise
from tests.simulation.noise import Draw
from tests.simulation.rates import Rate, rate
from tests.simulation.words import NOW, Rule, Windows, first_blocks, windows_of, words_of

BLOCKS = (6, 10, 20)
VARIANTS = (1, 2, 4)
MARGIN_PCT = 0.5
NO_MARGIN_PCT = 1e-4
PLANTED_PCT = 1.0
ASKINGS = 20
LOOKS = (6, 10, 14, 20)
"""Looks of the tables, about those of `blocks: auto` for 20 blocks."""
_AT_ONCE = 250

Drawing = Callable[[np.random.Generator, int, int, int], Draw]
"""Function from random numbers, repetitions, blocks and arms to ablations without an effect."""

NOISES: dict[str, noise.TrialNoise] = {
    "normal": noise.normal,
    "Student's t, 3 degrees": noise.heavy_tails,
    "5 % of trials ten sd slower": noise.outliers,
    "lognormal in all arms": noise.lognormal,
    "skewed in all arms": noise.skewed,
    "two modes in all arms": noise.two_modes,
    "autocorrelated 0.6": noise.autocorrelated,
    "each arm autocorrelated 0.6": noise.following_arms,
    "drift of 1 %": noise.drifting,
    "shared by the block": noise.shared_by_block,
    "first slot 0.5 % slower": noise.first_slot,
    "each arm autocorrelated 0.6, the A/A blocks not": noise.following_arms,
    "twice as wide as the A/A blocks": noise.doubled,
    "two nodes, +0.5 % on one and -0.5 % on the other": noise.two_nodes,
    "1 % slower after a trial of the first variant": noise.carried_over,
    "three times as wide in the variants": noise.wider_in_variants,
    "a slow mode in 10 % of the variants' trials": noise.slow_mode_of_variants,
    "10 % of the variants' trials 50 % slower": noise.long_mode_of_variants,
    "heavy skew in the variants only": noise.skewed_in_variants,
}
OF_AA: dict[str, noise.TrialNoise] = {
    name: NOISES[name]
    for name in (
        "Student's t, 3 degrees",
        "5 % of trials ten sd slower",
        "lognormal in all arms",
        "skewed in all arms",
        "two modes in all arms",
        "autocorrelated 0.6",
        "each arm autocorrelated 0.6",
    )
}
"""Noise of the A/A blocks; normal under the other names."""


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """Rates for one kind of noise, number of blocks and number of variants."""

    wrong_difference: Rate
    """At least one better or worse although nothing differs."""
    wrong_same: Rate
    """At least one same although every variant lies at the margin."""
    holds: Rate
    """All intervals contain the truth."""
    detected: Rate
    """A planted 1 % in one variant is proved to be above zero."""
    beyond: Rate
    """A planted 2 % in one variant is proved to be beyond the margin."""
    withheld: Rate
    """That variant's verdict is withheld because stalls or spreads differ."""


def noisy(name: str) -> Drawing:
    """Return the drawing of ablations under a noise of `NOISES`."""
    chosen = NOISES[name]
    of_aa = OF_AA.get(name, noise.normal)
    return lambda rng, repetitions, blocks, arms: draws.noisy(chosen, rng, repetitions, blocks, arms, of_aa=of_aa)


FEW_AA = (
    "normal",
    "5 % of trials ten sd slower",
    "lognormal in all arms",
    "autocorrelated 0.6",
    "each arm autocorrelated 0.6",
    "drift of 1 %",
)
"""Noises of ablations on a device that no calibration admits."""


def controlled(name: str) -> Drawing:
    """Return the drawing of ablations under a noise of `NOISES`, whose A/A blocks are those of their own control."""
    return partial(draws.with_control, NOISES[name])


def outcomes(
    drawing: Drawing, *, blocks: int, variants: int, repetitions: int, seed: int = 0, rule: Rule = NOW
) -> Outcomes:
    """Simulate ablations and count their verdicts."""
    parts = windows_in_parts(drawing, blocks, variants, repetitions, seed)
    return counted(parts, rule)


def counted(parts: Sequence[Windows], rule: Rule) -> Outcomes:
    """Count the verdicts on simulated ablations without an effect, and with added ones."""
    every = [_counted(windows, rule) for windows in parts]
    joined = {name: sum((part[name] for part in every[1:]), every[0][name]) for name in every[0]}
    return Outcomes(**joined)


def windows_in_parts(drawing: Drawing, blocks: int, variants: int, repetitions: int, seed: int) -> list[Windows]:
    """Draw and summarise ablations in parts, because their steps need memory."""
    rng = np.random.default_rng([seed, blocks, variants])
    sizes = [min(_AT_ONCE, repetitions - start) for start in range(0, repetitions, _AT_ONCE)]
    return [windows_of(drawing(rng, size, blocks, variants + 1)) for size in sizes]


def _counted(windows: Windows, rule: Rule) -> dict[str, Rate]:
    variants, alpha = windows.d.shape[1], alpha_of(1)
    none, planted = np.zeros(variants), np.zeros(variants)
    planted[0] = log_ratio(PLANTED_PCT)
    null = words_of(windows, alpha=alpha, margin_pct=NO_MARGIN_PCT, effects=none, rule=rule)
    at_margin = words_of(windows, alpha=alpha, margin_pct=MARGIN_PCT, effects=none + log_ratio(MARGIN_PCT), rule=rule)
    one, two = (
        words_of(windows, alpha=alpha, margin_pct=MARGIN_PCT, effects=effects, rule=rule)
        for effects in (planted, 2 * planted)
    )
    return {
        "wrong_difference": rate(null.changed.any(axis=1)),
        "wrong_same": rate(at_margin.same.any(axis=1)),
        "holds": rate(((null.low <= 0) & (null.high >= 0)).all(axis=1)),
        "detected": rate(one.above[:, 0]),
        "beyond": rate(two.better[:, 0] & (two.low[:, 0] > log_ratio(MARGIN_PCT))),
        "withheld": rate(one.withheld[:, 0]),
    }


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """Variants whose steps stall: an effect on the total that the medians do not show."""

    stalls: float
    """Mean number of stalled steps per window."""
    faster: float
    """Speed-up of the other steps, in natural log units."""

    @property
    def effect_pct(self) -> float:
        """Mean effect on throughput."""
        return 100 * math.expm1(draws.true_effect_of_stalls(stalls=self.stalls, faster=self.faster))

    def __call__(self, rng: np.random.Generator, repetitions: int, blocks: int, arms: int) -> Draw:
        """Draw such ablations."""
        return draws.stalling(rng, repetitions, blocks, arms, stalls=self.stalls, faster=self.faster)


@dataclass(frozen=True, kw_only=True)
class Crashes:
    """Variants whose slow trials crash, or are preempted, and are rerun: a loss that no receipt shows."""

    slow: float
    chance: float
    preempted: bool = False

    @property
    def effect_pct(self) -> float:
        """Mean effect on throughput if no trial crashed."""
        return 100 * math.expm1(-self.slow * self.chance)

    def __call__(self, rng: np.random.Generator, repetitions: int, blocks: int, arms: int) -> Draw:
        """Draw such ablations."""
        return draws.crashing(rng, repetitions, blocks, arms, chance=self.chance, preempted=self.preempted)


def verdict_rates(
    drawing: Drawing, *, blocks: int, repetitions: int, seed: int = 0, rule: Rule = NOW
) -> dict[str, Rate]:
    """Count the verdicts on one variant, whose effect is part of the draw."""
    parts = windows_in_parts(drawing, blocks, 1, repetitions, seed)
    every = [words_of(part, alpha=alpha_of(1), margin_pct=MARGIN_PCT, effects=np.zeros(1), rule=rule) for part in parts]
    return {
        name: rate(np.concatenate([getattr(words, name)[:, 0] for words in every]))
        for name in ("better", "worse", "same", "stalls", "withheld")
    }


def asked_again(drawing: Drawing, *, blocks: int, repetitions: int, seed: int = 0) -> Rate:
    """Count the questions with at least one `better` in `ASKINGS` ablations although nothing differs."""
    any_better = np.zeros(repetitions, dtype=np.bool_)
    for number in range(1, ASKINGS + 1):
        parts = windows_in_parts(drawing, blocks, 1, repetitions, seed + number)
        every = [words_of(p, alpha=alpha_of(number), margin_pct=NO_MARGIN_PCT, effects=np.zeros(1)) for p in parts]
        any_better |= np.concatenate([words.better[:, 0] for words in every])
    return rate(any_better)


Looking = Callable[[tuple[int, ...], int], tuple[float, Look]]
"""Function from the numbers of blocks and the number of a look to the level and the look at which it is judged."""


def jointly(looks: tuple[int, ...], number: int) -> tuple[float, Look]:
    """Return the level of all looks and the look: their joint distribution is used."""
    return alpha_of(1), Look(looks, number)


def by_shares(looks: tuple[int, ...], number: int) -> tuple[float, Look]:
    """Return the level of a look alone, its share: the rule until November 2026."""
    return alpha_of(1) * level_shares(looks)[number], ONE_LOOK


def at_the_end(looks: tuple[int, ...], number: int) -> tuple[float, Look]:
    """Return the whole level at the last look and nothing before: a fixed number of blocks."""
    return alpha_of(1) if number == len(looks) - 1 else 0.0, ONE_LOOK


def with_looks(
    drawing: Drawing,
    *,
    variants: int,
    repetitions: int,
    effect_pct: float,
    looks: tuple[int, ...] = LOOKS,
    margin_pct: float = MARGIN_PCT,
    looking: Looking = jointly,
    rule: Rule = NOW,
    seed: int = 0,
) -> "Looked":
    """Simulate ablations that stop at the first look at which every variant has an answer.

    They never stop for futility, which could only remove verdicts.
    """
    effects = np.full(variants, log_ratio(effect_pct))
    judged = partial(_looked, effects=effects, margin_pct=margin_pct, looks=looks, looking=looking, rule=rule)
    counted = [judged(part) for part in windows_in_parts(drawing, looks[-1], variants, repetitions, seed)]
    changed, better, same, blocks = (np.concatenate(values) for values in zip(*counted, strict=True))
    return Looked(changed=rate(changed), better=rate(better), same=rate(same), blocks=blocks)


@dataclass(frozen=True, kw_only=True)
class Looked:
    """Rates of ablations with looks."""

    changed: Rate
    """At least one better or worse."""
    better: Rate
    """The first variant is better."""
    same: Rate
    """The first variant is the same."""
    blocks: Array
    """Blocks of each ablation."""


def _looked(
    windows: Windows, *, effects: Array, margin_pct: float, looks: tuple[int, ...], looking: Looking, rule: Rule
) -> tuple[Array, Array, Array, Array]:
    repetitions = windows.d.shape[0]
    running = np.ones(repetitions, dtype=np.bool_)
    changed, better, same, blocks = np.zeros((4, repetitions))
    for number, size in enumerate(looks):
        alpha, look = looking(looks, number)
        part = first_blocks(windows, size)
        words = words_of(part, alpha=alpha, margin_pct=margin_pct, effects=effects, look=look, rule=rule)
        ends = running & (np.all(words.changed | words.same, axis=1) | (size == looks[-1]))
        changed[ends], better[ends] = np.any(words.changed, axis=1)[ends], words.better[ends, 0]
        same[ends], blocks[ends] = words.same[ends, 0], size
        running &= ~ends
    return changed, better, same, blocks


LOSS_NOISES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "Student's t, 3 degrees": lambda rng, shape: rng.standard_t(3, shape) / np.sqrt(3),
    "skewed up": lambda rng, shape: (rng.lognormal(size=shape) - np.exp(0.5)) / np.sqrt((np.e - 1) * np.e),
    "skewed down": lambda rng, shape: (np.exp(0.5) - rng.lognormal(size=shape)) / np.sqrt((np.e - 1) * np.e),
}
"""Differences of seeds with mean 0 and standard deviation 1; the last two are lognormal."""
_LOSS = 3.0


def losses_passed(noise: str, *, seeds: int, bound: float, change: float, repetitions: int) -> Rate:
    """Return how often `not_worse_by: bound` passes a variant whose mean loss is truly higher by `change`.

    Both are in standard deviations of the differences between seeds.
    """
    rng = np.random.default_rng([seeds, round(100 * bound), round(100 * change)])
    rows = LOSS_NOISES[noise](rng, (repetitions, seeds)) + change
    return rate([_passes(row / _LOSS, Difference(bound, "")) for row in rows])


def _passes(shares: Array, bound: Difference) -> bool:
    sample = Sample(differences=tuple(shares.tolist()), places=(0,) * len(shares), baseline=_LOSS)
    return proved(sample, bound, "lower", alpha_of(1), metric="loss_val")[0] is True


FALL = 0.1
"""Percent by which a loss falls with one percent more model FLOPs, as in a power law of this exponent."""
LOSS_SD = 0.003
"""Standard deviation of the differences of seeds, as a share of the loss."""


def wrong_of_unequal_flops(apart: float, *, seeds: int, repetitions: int) -> Rate:
    """Return how often two equal models differ, almost without a margin, if one had `apart` more FLOPs (a share)."""
    rng = np.random.default_rng([seeds, round(1e6 * apart)])
    shares = rng.normal(-FALL * apart, LOSS_SD, (repetitions, seeds))
    return rate(fit(shares, np.zeros(seeds)).p_different() <= alpha_of(1))


@dataclass(frozen=True, kw_only=True)
class Adoptions:
    """Rates of one variant with a true effect, among variants without one."""

    above: Rate
    """Proved to be above zero, with an estimate beyond the margin."""
    beyond: Rate
    """Better, with the whole interval beyond the margin of `MARGIN_PCT`."""
    adopted: Rate
    """Beyond the margin, with an estimate from the threshold on."""
    by_estimate: Rate
    """Above zero, with such an estimate, which was enough before."""


def adoptions(*, blocks: int, effect_pct: float, adopt_if_pct: float, repetitions: int, variants: int = 1) -> Adoptions:
    """Return how often a variant with this true effect is adopted."""
    effects = np.zeros(variants)
    effects[0] = log_ratio(effect_pct)
    above, beyond, enough = [], [], []
    for windows in windows_in_parts(noisy("normal"), blocks, variants, repetitions, 0):
        words = words_of(windows, alpha=alpha_of(1), margin_pct=MARGIN_PCT, effects=effects)
        above.append(words.above[:, 0])
        beyond.append(words.better[:, 0])
        enough.append(words.estimate[:, 0] >= log_ratio(adopt_if_pct))
    good, far, large = (np.concatenate(flags) for flags in (above, beyond, enough))
    return Adoptions(above=rate(good), beyond=rate(far), adopted=rate(far & large), by_estimate=rate(good & large))


def with_slow_mode(share: float) -> Drawing:
    """Return the drawing of ablations in which a `share` of the variants' trials is slow, and no mean differs."""
    slow = partial(noise.slow_mode_of_variants, share=share)
    return lambda rng, repetitions, blocks, arms: draws.noisy(slow, rng, repetitions, blocks, arms)


def noted(name: str, *, blocks: int, repetitions: int, seed: int = 0) -> tuple[Rate, Rate]:
    """Return how often a note says that a trial acts on the next one, and that two nodes, by turns, differ."""
    windows = windows_of(noisy(name)(np.random.default_rng([seed, blocks]), repetitions, blocks, 2))
    places = windows.places[:, 0]
    nodes = ["ab"[index % 2] for index in range(blocks)]
    carried, differing = [], []
    for d, x, after in zip(windows.d[:, 0], places, windows.after[:, 0], strict=True):
        sample = Sample(differences=tuple(d.tolist()), places=tuple(x.astype(int).tolist()))
        tested, effects = carry_over(sample, after.tolist()), node_effects(nodes, sample)
        carried.append(tested is not None and tested.p <= LEVEL)
        differing.append(effects is not None and effects.p <= LEVEL)
    return rate(carried), rate(differing)
