"""A stored verdict in a few lines, for pages."""

from dataclasses import dataclass
from functools import lru_cache

from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.reporting.pages.first_screen import headline, word_cell
from ablate.experiments.reporting.table import Cell
from ablate.experiments.reporting.verdict_layout import by_importance, lay_out


@dataclass(frozen=True, kw_only=True)
class VariantLine:
    """One variant's answer."""

    arm: str
    word: Cell
    headline: str
    decision: Cell


@dataclass(frozen=True, kw_only=True)
class ShortAnswer:
    """The answer of an ablation in a few lines."""

    lead: str
    """One sentence."""
    variants: tuple[VariantLine, ...]
    """The most important first."""


@lru_cache(maxsize=256)
def read_answer(document: str) -> ShortAnswer:
    """Return the answer of a stored verdict, which never changes."""
    verdict = Verdict.model_validate_json(document)
    judged = {variant.arm: variant for variant in verdict.variants}
    laid_out = lay_out(verdict)
    lines = (
        VariantLine(
            arm=one.arm,
            word=word_cell(judged[one.arm], one.word),
            headline=headline(verdict, judged[one.arm]),
            decision=one.decision,
        )
        for one in by_importance(verdict, laid_out)
    )
    return ShortAnswer(lead=laid_out.lead, variants=tuple(lines))
