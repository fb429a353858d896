"""The verdict: the answer of an ablation, variant by variant, with its numbers and the rule behind it."""

from collections.abc import Mapping
from typing import Any

from experiments.analysis.arm_summary import ArmSummary
from experiments.analysis.exact import ExactComparison
from experiments.documents import Frozen
from experiments.outcomes import Decision, VerdictWord
from experiments.records.circumstances import Circumstances


class Comparison(Frozen):
    """One metric of one variant against the baseline, paired by block: d = ln(variant / baseline)."""

    metric: str
    blocks: int
    delta_pct: float
    """Mean of d, as percent: 100 * (exp(mean d) - 1)."""
    median_pct: float
    ci_low_pct: float
    ci_high_pct: float
    """95 % interval: t below 20 and above 200 blocks, studentised bootstrap between."""
    ci90_low_pct: float
    ci90_high_pct: float
    """90 % interval for the two one-sided tests of sameness."""
    p_sign_flip: float
    """Exact two-sided sign-flip p value; from 17 blocks by seeded flips."""
    p_holm: float
    """Paired t p value after Holm's correction over the variants; this one decides."""
    sd_pct: float
    mde_pct: float
    """Minimum detectable effect at this n and this sd."""
    differences_pct: tuple[float, ...]
    """d of every block as percent, in block order."""


class RequirementResult(Frozen):
    """One `require` entry of the rule, judged."""

    metric: str
    rule: str
    """The rule in words, for example "max_delta 6.0 GiB" or "identical"."""
    passed: bool
    detail: str


class VariantVerdict(Frozen):
    """The answer for one variant, with the numbers and the rule behind it."""

    arm: str
    verdict: VerdictWord
    """The published word; capped at `inconclusive` where the node class is not calibrated."""
    measured: VerdictWord
    """What the samples alone say."""
    reason: str
    """One sentence: why this word."""
    decision: Decision
    primary: Comparison | None
    """By statistics; None where the primary metric is exact, and where there are no numbers."""
    exact: ExactComparison | None = None
    """By value, where the primary metric is exact."""
    secondary: tuple[Comparison, ...] = ()
    """Other metrics on the same footing, for information."""
    requirements: tuple[RequirementResult, ...] = ()
    gates_live: str
    """For example "18/18"."""
    blocks_needed: int | None = None
    """Blocks that would resolve the margin, when inconclusive."""
    device_minutes_needed: float | None = None
    notes: tuple[str, ...] = ()


class Verdict(Frozen):
    """The answer of an ablation."""

    ablation: str
    spec_digest: str
    rule_digest: str
    rule: Mapping[str, Any]
    circumstances: Circumstances
    """Broken attempts, earlier askings and A/A blocks, as the judge knew them."""
    blocks_planned: int
    blocks_counted: int
    node_class: str
    baseline: str
    variants: tuple[VariantVerdict, ...]
    arms: Mapping[str, ArmSummary]
    """Every arm by itself, the baseline among them."""
    digest: str

    @property
    def calibrated(self) -> bool:
        """Whether words may be published: A/A blocks are known for what ran."""
        return self.circumstances.admission.refused_because is None
