"""The pre-registered rule: everything that decides how samples become a verdict, hashed before the first sample."""

from typing import Any

from experiments.design.power import ALPHA
from experiments.design.spec import AblationSpec
from experiments.digest import digest

ESTIMATOR: dict[str, Any] = {
    "window": "timed steps; step 0 and warm-up are kept and marked",
    "estimate": "mean",
    "beside": "median",
    "outliers": {
        "beyond": "median + 5 * max(1.4826 * MAD, 0.2 % of the median)",
        "at_most": "a tenth of the window, at least one step; when more lie beyond, none is excluded",
    },
}
"""How one trial's timed steps become one number."""

COMPARISON: dict[str, Any] = {
    "unit": "one trial per arm and block, d = ln(variant / baseline) within the block",
    "alpha": ALPHA,
    "interval": "t below 20 and above 200 blocks, studentised bootstrap of 4999 seeded resamples between",
    "beside": "sign flip p, exact up to 16 blocks, 9999 seeded flips beyond; reported, not decisive",
    "several_variants": "Holm on the paired t p values",
    "better_or_worse": "95 % interval excludes zero, Holm p at most alpha, estimate beyond the margin",
    "same": "90 % interval inside the margin",
    "missing": "fails",
}
"""How trials become a word."""

EXACT_COMPARISON: dict[str, Any] = {
    "unit": "one value per arm and seed",
    "exact": "every repeat of an arm with a seed gives the same value, bit for bit, in two blocks at least; or else "
    "inconclusive",
    "better_or_worse": "the change lies beyond the margin, the same way for every seed",
    "same": "the change lies within the margin for every seed",
    "without_direction": "same: bit-identical; worse: not",
    "missing": "fails",
}
"""How trials become a word where an exact metric decides."""


def rule_of(spec: AblationSpec) -> dict[str, Any]:
    """Return the whole rule of `spec` as plain JSON."""
    primary = spec.verdict.primary
    return {
        "primary": {
            "metric": primary.metric,
            "margin_pct": primary.margin,
            "adopt_if_pct": primary.threshold_pct,
        },
        "require": [requirement.model_dump(mode="json", exclude_none=True) for requirement in spec.verdict.require],
        "blocks": spec.design.blocks.number,
        "seeds": list(spec.design.seeds),
        "estimator": ESTIMATOR,
        "comparison": EXACT_COMPARISON if primary.exact else COMPARISON,
    }


def rule_digest(spec: AblationSpec) -> str:
    """Return the digest of `rule_of(spec)`."""
    return digest(rule_of(spec))
