"""The ledger: how often A/A ablations were given a word that nothing deserved, with what that says about the rate."""

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
    """Judge every A/A ablation in `calibrations` by the rule of a first asking and count the false words.

    The A/A blocks of one ablation on one key are judged together, once; fewer than six are left out. No block is used
    twice.
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
    """Return the word that an ablation with these blocks would get, and whether it differs from zero."""
    primary = Primary(metric=METRIC, margin=f"{blocks[0].margin_pct:g}%")  # type: ignore[arg-type]  # as users write it
    sample = Sample(differences=tuple(b.difference for b in blocks), places=tuple(b.place for b in blocks))
    levels = Levels(family=1, alphas={_REPEAT: alpha_of(1)}, margin_pct=primary.margin)
    found = compare(METRIC, {_REPEAT: sample}, levels)[_REPEAT]
    return word_of(found, primary), found.p_holm <= found.alpha


def upper_bound(errors: int, trials: int) -> float:
    """Return the upper 95 % bound of an error rate (Clopper and Pearson); 1 without any trial."""
    return 1.0 if errors >= trials else float(scipy.special.betaincinv(errors + 1, trials - errors, CONFIDENCE))


def needed(errors: int) -> int:
    """Return how many A/A ablations with this many false words support "at most 5 %"."""
    trials = errors + 1
    while upper_bound(errors, trials) > ALPHA:
        trials += 1
    return trials
