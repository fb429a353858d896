"""The ledger: how often A/A ablations received a verdict although no effect existed, with a bound of the rate."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import scipy

from experiments.analysis.answer import word_of
from experiments.analysis.comparing import Levels, Sample, compare
from experiments.analysis.noise.calibrate import CONFIDENCE, METRIC
from experiments.design.power import ALPHA, alpha_of
from experiments.design.spec import MIN_BLOCKS, Primary
from experiments.outcomes import VerdictWord
from experiments.records.calibration import AABlock, Calibration, Ledger

_REPEAT = "repeat"


def keep_ledger(calibrations: Iterable[Calibration]) -> Ledger:
    """Judge every A/A ablation in `calibrations` by the rule of a first asking, and count the false verdicts.

    The A/A blocks of one ablation on one key are judged once, together; ablations with fewer than six are left out.
    """
    words = [judge_blocks(blocks) for calibration in calibrations for blocks in by_ablation(calibration.samples)]
    false_words = sum(word in {VerdictWord.BETTER, VerdictWord.WORSE} for word, _ in words)
    return Ledger(
        ablations=len(words),
        false_words=false_words,
        differing=sum(differs for _, differs in words),
        upper_bound=upper_bound(false_words, len(words)),
    )


def by_ablation(samples: Sequence[AABlock]) -> Iterator[tuple[AABlock, ...]]:
    """Yield the A/A blocks of every ablation that has at least six."""
    for ablation in dict.fromkeys(block.ablation for block in samples):
        own = tuple(block for block in samples if block.ablation == ablation)
        if len(own) >= MIN_BLOCKS:
            yield own


@lru_cache(maxsize=65_536)
def judge_blocks(blocks: tuple[AABlock, ...]) -> tuple[VerdictWord, bool]:
    """Return the verdict on an ablation with these blocks, and whether it differs from zero."""
    primary = Primary(metric=METRIC, margin=f"{blocks[0].margin_pct:g}%")  # type: ignore[arg-type]  # a spec's text
    sample = Sample(differences=tuple(b.difference for b in blocks), places=tuple(b.place for b in blocks))
    levels = Levels(family=1, alphas={_REPEAT: alpha_of(1)}, margin_pct=primary.margin)
    comparison = compare(METRIC, {_REPEAT: sample}, levels)[_REPEAT]
    return word_of(comparison, primary), comparison.p_holm <= comparison.alpha


def upper_bound(errors: int, trials: int) -> float:
    """Return the upper 95 % bound of an error rate (Clopper and Pearson); 1 without trials."""
    return 1.0 if errors >= trials else float(scipy.special.betaincinv(errors + 1, trials - errors, CONFIDENCE))


def needed(errors: int) -> int:
    """Return the number of A/A ablations with `errors` false verdicts that supports "at most 5 %"."""
    trials = errors + 1
    while upper_bound(errors, trials) > ALPHA:
        trials += 1
    return trials
