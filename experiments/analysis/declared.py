"""Declared metrics: numbers that a program reports, and values of theirs that no test of a ratio can judge."""

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Literal

from ablate.experiments.analysis.evidence import Evidence
from ablate.experiments.analysis.statistics import MOST_APART, log_of_ratio
from ablate.experiments.block_numbers import block_name
from ablate.experiments.design.metrics import CURVE_METRICS, LOSS_METRICS, METRICS, SEED_METRICS
from ablate.experiments.design.plan import Plan
from ablate.experiments.outcomes import Outcome
from ablate.experiments.records.receipts import Receipt, read_named


def no_ratio(evidence: Evidence, name: str) -> str | None:
    """Name the first measured values of a declared metric or a loss that have no ratio; None without any."""
    if name in METRICS:
        return _too_far(evidence, name) if name in LOSS_METRICS else None
    for pair in evidence.pairs:
        values = {one.arm: read_named(name, one) for one in (pair.variant, pair.baseline) if _measured(one)}
        present = {arm: value for arm, value in values.items() if value is not None}
        bad = next((arm for arm, value in present.items() if not value > 0), None)
        where = block_name(pair.block_index)
        if bad is not None:
            return f"{where}, arm '{bad}': {name} is {present[bad]:g}, and a margin in percent needs numbers above zero"
        if len(present) == 2 and log_of_ratio(*present.values()) is None:
            both = " and ".join(f"{value:g}" for value in present.values())
            return f"{where}: {name} is {both}, more than a factor of {MOST_APART:g} apart"
    return None


def _too_far(evidence: Evidence, name: str) -> str | None:
    for pair in evidence.pairs:
        own, base = read_named(name, pair.variant), read_named(name, pair.baseline)
        if own is not None and base is not None and max(abs(own), abs(base)) > MOST_APART:
            return f"{block_name(pair.block_index)}: {name} is {own:g} and {base:g}, too large for statistics"
    return None


def _measured(receipt: Receipt) -> bool:
    return receipt.outcome is Outcome.MEASURED


def repeated_seeds(evidence: Evidence, name: str) -> str | None:
    """Say which seeds repeat one run although the arms differ: all of one arm, or two in both arms; None if none do.

    For losses, numbers of their curves (the last loss stands for the curve) and declared metrics.
    Such blocks do not show what another run would give.
    """
    if name in METRICS and name not in SEED_METRICS:
        return None
    name = "loss_val" if name in CURVE_METRICS else name
    values = [(read_named(name, pair.variant), read_named(name, pair.baseline)) for pair in evidence.pairs]
    if len({pair.seed for pair in evidence.pairs}) < 2 or all(own == base for own, base in values):
        return None
    for arm, own in ((evidence.arm.name, [one for one, _ in values]), ("baseline", [base for _, base in values])):
        if len(set(own)) == 1:
            return f"arm '{arm}' reports {name} {own[0]:g} with every seed, so its blocks repeat one run"
    every = [value for both in values for value in both if value is not None]
    if (step_of(every) or 0.0) * _FINE > max(every) - min(every):
        return None
    first: dict[tuple[float | None, float | None], int] = {}
    for pair, both in zip(evidence.pairs, values, strict=True):
        if (seed := first.setdefault(both, pair.seed)) != pair.seed:
            return f"seeds {seed} and {pair.seed} give the same {name} in both arms, so their blocks repeat one run"
    return None


_FINE = 1000
"""Steps in the range of values that are so many that values do not meet by chance."""
_WHOLE = 1e-6
"""Share of the range of values that counts as no difference."""


def step_above(evidence: Evidence, name: str, margin: float) -> str | None:
    """Say that a loss or a declared metric comes in steps above `margin`, a share of the baseline's mean; or None."""
    if name in METRICS and name not in LOSS_METRICS:
        return None
    arms = [[read_named(name, one) for one in own] for own in zip(*_receipts(evidence), strict=True)]
    step = step_of([value for own in arms for value in own if value is not None])
    base = [value for value in arms[1] if value is not None] if arms else []
    if step is None or not base or step <= margin * abs(sum(base) / len(base)):
        return None
    return f"{name} comes in steps of {step:g}, and no difference below a step shows"


def _receipts(evidence: Evidence) -> list[tuple[Receipt, Receipt]]:
    return [(pair.variant, pair.baseline) for pair in evidence.pairs]


def step_of(values: Sequence[float]) -> float | None:
    """Return the largest step of which all gaps between values are multiples; None if too few values show one."""
    distinct = sorted(set(values))
    gaps = [high - low for low, high in pairwise(distinct)]
    if not gaps or (len(gaps) == 1 and len(values) == len(distinct)):
        return None
    least = _WHOLE * (distinct[-1] - distinct[0])
    return reduce(lambda one, other: _common_divisor(one, other, least), gaps)


def _common_divisor(one: float, other: float, least: float) -> float:
    """Return the greatest common divisor of two lengths by Euclid's method; less than `least` counts as nothing."""
    while other > least:
        rest = one % other
        one, other = other, min(rest, other - rest)
    return one


def declared_directions(plan: Plan, primary: str) -> dict[str, Literal["higher", "lower"]]:
    """Return the better direction of the declared metrics that are compared.

    The deciding one; the others for information, if every block has a seed of its own.
    """
    declared = plan.baseline.config.declared
    own_seeds = len({block.seed for block in plan.blocks}) == len(plan.blocks)
    return {name: better for name, better in declared.items() if name == primary or own_seeds}
