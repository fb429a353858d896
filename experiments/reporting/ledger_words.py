"""The service's own rate of false words, in a sentence."""

from experiments.analysis.noise.ledger import needed
from experiments.design.power import ALPHA
from experiments.records.calibration import Ledger
from experiments.reporting import wording


def false_words(ledger: Ledger) -> str:
    """Say the service's own rate of false words, and what it can support."""
    if ledger.ablations == 0:
        return "No A/A ablation has been judged yet, so the rate of false words of this service is not known."
    found = f"{ledger.false_words} false {'word' if ledger.false_words == 1 else 'words'} in "
    judged = wording.counted(ledger.ablations, "A/A ablation")
    bound = wording.plain_percent(100 * ledger.upper_bound)
    support = (
        ""
        if ledger.upper_bound <= ALPHA
        else f" It takes {needed(ledger.false_words)} to support at most 5{wording.SPACE}%."
    )
    sure = f"with 95{wording.SPACE}% confidence (Clopper and Pearson)"
    return f"{found}{judged}: at most {bound} false words, {sure}.{support}"
