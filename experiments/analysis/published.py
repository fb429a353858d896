"""Published tables: printed comparisons as data, and the verdict that they support by our rules.

Such a table has no receipts: no guards, no raw steps, no order of trials. It only shows how many fresh processes stand
behind each number. The steps of one process are one sample.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError, model_validator

from ablate.experiments.analysis.answer import adopt_or_reject, decide, sentence, word_of
from ablate.experiments.analysis.comparing import Levels, Sample, compare
from ablate.experiments.analysis.requirements import proved, result_of, within_bound
from ablate.experiments.analysis.statistics import log_ratio, percent
from ablate.experiments.analysis.verdicts import Comparison, RequirementResult
from ablate.experiments.design.load import load_values
from ablate.experiments.design.metrics import METRICS, PAIRED_METRICS
from ablate.experiments.design.power import alpha_of
from ablate.experiments.design.problems import from_validation, shown
from ablate.experiments.design.spec import MIN_BLOCKS, MIN_PROVING_SEEDS
from ablate.experiments.design.spec_values import refuse
from ablate.experiments.design.verdict_rule import Primary, Requirement
from ablate.experiments.documents import Frozen, Whole
from ablate.experiments.errors import SpecError
from ablate.experiments.outcomes import Decision, VerdictWord


def _printed(text: str) -> str:
    if not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,15})?", text, re.ASCII):
        rule = "a number as printed, at least 0, such as '183.016', with at most 15 digits before and after the point"
        raise refuse(f"{shown(text)} is not allowed; allowed: {rule}")
    return text


Printed = Annotated[str, AfterValidator(_printed)]
"""A number as printed, which keeps its number of digits."""


class PublishedValues(Frozen):
    """One metric: one printed number per fresh process of an arm."""

    baseline: tuple[Printed, ...] = Field(min_length=1)
    variant: tuple[Printed, ...] = Field(min_length=1)

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """The numbers of (baseline, variant), process by process."""
        return [(float(base), float(own)) for base, own in zip(self.baseline, self.variant, strict=True)]


class PublishedTable(Frozen):
    """One printed comparison."""

    title: str
    source: str
    """Publication."""
    claim: str
    """The authors' conclusion in short."""
    node: str
    variant: str
    steps_per_process: Whole = Field(ge=1, le=10**9)
    """Steps behind each number. They are not samples."""
    primary: Primary
    require: tuple[Requirement, ...] = ()
    values: Mapping[str, PublishedValues]
    """By metric."""

    @model_validator(mode="after")
    def _comparable(self) -> "PublishedTable":
        wanted = {self.primary.metric, *(requirement.metric for requirement in self.require)}
        if unknown := sorted(set(self.values) - set(METRICS)):
            raise ValueError(f"unknown metric '{unknown[0]}'; known: {', '.join(METRICS)}")
        if missing := sorted(wanted - set(self.values)):
            raise ValueError(f"no values of '{missing[0]}', which the rule names")
        if self.primary.metric not in PAIRED_METRICS:
            raise ValueError(f"the primary metric must be one of {', '.join(PAIRED_METRICS)}")
        primary = self.values[self.primary.metric]
        if not all(float(number) > 0 for number in (*primary.baseline, *primary.variant)):
            raise ValueError(f"a value of '{self.primary.metric}' is 0; allowed: above 0, the verdict compares ratios")
        counts = {len(side) for values in self.values.values() for side in (values.baseline, values.variant)}
        if len(counts) > 1:
            raise ValueError(f"every metric needs one number per process of both arms; got counts {sorted(counts)}")
        return self

    @property
    def processes(self) -> int:
        """Fresh processes of each arm."""
        return len(self.values[self.primary.metric].baseline)


class PublishedVerdict(Frozen):
    """The verdict on a published table."""

    word: VerdictWord
    decision: Decision
    reason: str
    change_pct: float
    """Of the primary metric: 100 * (exp(mean of d) - 1)."""
    primary: Comparison | None
    """None with fewer processes than an ablation needs."""
    requirements: tuple[RequirementResult, ...]


def read_table(text: bytes) -> PublishedTable:
    """Return the table in `text` (YAML). Raises SpecError with all problems."""
    try:
        values = load_values(text, "application/yaml")
    except SpecError as error:
        raise SpecError([replace(p, detail=_of_a_table(p.detail), hint=None) for p in error.problems]) from error
    try:
        return PublishedTable.model_validate(values)
    except ValidationError as error:
        raise SpecError(from_validation(error, lambda _: ())) from error


def _of_a_table(detail: str) -> str:
    return detail.replace("the spec", "the table").replace("a spec", "a table")


def assess(table: PublishedTable) -> PublishedVerdict:
    """Return the verdict on `table`.

    It is `inconclusive` with fewer processes than an ablation needs blocks. Otherwise it is the verdict of the numbers
    alone, because the order of trials, the guards and the noise of the device are unknown.
    """
    pairs = table.values[table.primary.metric].pairs
    differences = [log_ratio(100 * (own / base - 1)) for base, own in pairs]
    change = percent(sum(differences) / len(differences))
    requirements = tuple(_judge(requirement, table.values[requirement.metric]) for requirement in table.require)
    comparison = _compared(table, differences)
    word = VerdictWord.INCONCLUSIVE if comparison is None else word_of(comparison, table.primary)
    return PublishedVerdict(
        word=word,
        decision=decide(word, adopt_or_reject(comparison, table.primary), requirements),
        reason=_too_few(table, change) if comparison is None else sentence(word, comparison, table.primary),
        change_pct=change,
        primary=comparison,
        requirements=requirements,
    )


def _compared(table: PublishedTable, differences: Sequence[float]) -> Comparison | None:
    if len(differences) < MIN_BLOCKS:
        return None
    levels = Levels(family=1, alphas={table.variant: alpha_of(1)}, margin_pct=table.primary.margin_pct)
    sample = Sample(differences=tuple(differences), places=(0,) * len(differences))
    return compare(table.primary.metric, {table.variant: sample}, levels)[table.variant]


def _too_few(table: PublishedTable, change: float) -> str:
    number = table.processes
    processes = "one process" if number == 1 else f"{number} processes"
    return (
        f"{table.primary.metric} {change:+.3f} % from {processes} of each arm (n = {number}): "
        f"the {table.steps_per_process} steps of a process are one sample; "
        f"a verdict needs at least {MIN_BLOCKS} interleaved blocks"
    )


def _judge(requirement: Requirement, values: PublishedValues) -> RequirementResult:
    passed, detail = within_bound(requirement, [(own, base) for base, own in values.pairs]) or _compared_losses(
        requirement, values
    )
    return result_of(requirement, passed, detail)


def _compared_losses(requirement: Requirement, values: PublishedValues) -> tuple[bool | None, str]:
    bound = requirement.not_worse_by
    if bound is None:
        return _identical(values)
    gaps = [own - base for base, own in values.pairs]
    if len(gaps) < MIN_PROVING_SEEDS:
        runs = "one run" if len(gaps) == 1 else f"{len(gaps)} runs"
        mean = sum(gaps) / len(gaps)
        return None, f"{mean:+.4f} nats from {runs} of each arm: a test needs {MIN_PROVING_SEEDS} seeds"
    baseline = sum(base for base, _ in values.pairs) / len(gaps)
    sample = Sample(differences=tuple(gap / baseline for gap in gaps), places=(0,) * len(gaps), baseline=baseline)
    return proved(sample, bound, "lower", alpha_of(1), metric=requirement.metric)


def _identical(values: PublishedValues) -> tuple[bool, str]:
    other = [pair for pair in zip(values.baseline, values.variant, strict=True) if pair[0] != pair[1]]
    if other:
        return False, f"differs in {len(other)} of {len(values.baseline)} processes: {other[0][0]} and {other[0][1]}"
    digits = min(len(text.partition(".")[2]) for text in values.baseline)
    return True, f"identical in the {digits} printed decimals; the bits are unknown"
