"""Admission of devices to verdicts by A/A blocks, and the ledger of false verdicts."""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import scipy

from ablate.experiments.analysis.answer import word_of
from ablate.experiments.analysis.comparing import Levels, Sample, compare
from ablate.experiments.analysis.guards import median_clock_mhz
from ablate.experiments.analysis.noise.calibrate import CONFIDENCE, METRIC, key_of, seconds
from ablate.experiments.design.aa_spec import ADMITTING_BLOCKS
from ablate.experiments.design.power import ALPHA, alpha_of
from ablate.experiments.design.spec import MIN_BLOCKS, AblationSpec
from ablate.experiments.design.verdict_rule import Primary
from ablate.experiments.outcomes import BASELINE, Outcome, VerdictWord
from ablate.experiments.records.calibration import AABlock, Calibration, CalibrationKey, Ledger
from ablate.experiments.records.circumstances import Admission
from ablate.experiments.records.receipts import Receipt

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
    levels = Levels(family=1, alphas={_REPEAT: alpha_of(1)}, margin_pct=primary.margin_pct)
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


STALE_DAYS = 30
VARIANCE_LEVEL = 0.01
"""Level of the test whether sentinel and hidden blocks are noisier than the calibration."""
MEAN_LEVEL = 0.01
"""Level of the test whether equal arms differ, which would show something else than noise."""
MAX_CLOCK_SHIFT = 0.01
"""Largest relative shift of the median device clock since the calibration."""

_FIELDS = {
    "device_serial": "another device",
    "recipe": "another recipe",
    "shape_digest": "another shape",
    "estimator_digest": "another estimator or window",
    "software_digest": "other code or versions",
}
"""Meaning of a changed field of a key, most important first."""
_DAY_S = 86_400.0


def admission_of(
    spec: AblationSpec,
    receipts: Sequence[Receipt],
    calibrations: Sequence[Calibration],
    *,
    ledger: Ledger,
    mended_by: str,
) -> Admission:
    """Return whether `calibrations` allow verdicts on `receipts`.

    Every device that measured a baseline needs its own calibration, unless the rule judges no time by a test.
    `mended_by` is the command that measures one.
    """
    if not spec.verdict.timed:
        return Admission(refused_because=None, ledger=ledger)
    measured = [one for one in receipts if one.arm == BASELINE and one.outcome is Outcome.MEASURED]
    by_key: dict[CalibrationKey, list[Receipt]] = {}
    for receipt in measured:
        by_key.setdefault(key_of(spec, receipt), []).append(receipt)
    own = {one.key: one for one in calibrations}
    refused = [reason for key, ran in by_key.items() if (reason := _refusal(key, ran, own)) is not None]
    reason = "no baseline was measured" if not measured else next(iter(refused), None)
    return Admission(
        calibrations=tuple(own[key] for key in by_key if key in own),
        refused_because=reason,
        mended_by=None if reason is None else mended_by,
        ledger=ledger,
    )


def _refusal(
    key: CalibrationKey, receipts: Sequence[Receipt], calibrations: dict[CalibrationKey, Calibration]
) -> str | None:
    calibration = calibrations.get(key)
    if calibration is None:
        return _no_blocks(key, list(calibrations))
    return next(_problems(calibration, receipts), None)


def _no_blocks(key: CalibrationKey, calibrated: Sequence[CalibrationKey]) -> str:
    """Say that there are no A/A blocks, or how the nearest ones differ."""
    text = f"there are no A/A blocks for {key.node_class} {key.device_serial}"
    like = [other for other in calibrated if other.node_class == key.node_class]
    if not like:
        return text
    nearest = min(like, key=lambda other: len(_changed(key, other)))
    return f"{text}; the nearest ones have {' and '.join(_FIELDS[name] for name in _changed(key, nearest))}"


def _changed(one: CalibrationKey, other: CalibrationKey) -> list[str]:
    return [name for name in _FIELDS if getattr(one, name) != getattr(other, name)]


def _problems(calibration: Calibration, receipts: Sequence[Receipt]) -> Iterator[str]:
    latest = max(seconds(receipt.started_at) for receipt in receipts)
    yield from standing_problems(calibration, latest)
    clock = median_clock_mhz(receipts)
    if clock is not None and calibration.clock_mhz is not None:
        shift = clock / calibration.clock_mhz - 1
        if abs(shift) > MAX_CLOCK_SHIFT:
            yield f"the device clock moved by {100 * shift:+.1f} % since the calibration; allowed: 1 %"


def standing_problems(calibration: Calibration, at: float) -> Iterator[str]:
    """Yield the reasons why a calibration admits no trial at the time `at`, in seconds since 1970.

    A time always has noise. A number that a program reports may repeat bit for bit, and a verdict on it rests on the
    spread over the seeds of its own blocks.
    """
    if calibration.blocks < MIN_BLOCKS:
        yield f"this device has {calibration.blocks} A/A blocks; {MIN_BLOCKS} allow a verdict"
    if calibration.sd_pct == 0 and not calibration.bit_repeatable:
        yield "the A/A blocks show no noise at all, so they measured nothing"
        return
    if calibration.sd_pct and mean_p(calibration) < MEAN_LEVEL:
        yield f"the A/A blocks differ from zero by {calibration.mean_pct:+.2f} % (t test, p {mean_p(calibration):.2g})"
    days = min(abs(seconds(block.started_at) - at) for block in calibration.samples) / _DAY_S
    if days > STALE_DAYS:
        yield f"the nearest A/A block is {days:.0f} days away; allowed: {STALE_DAYS}"
    if calibration.variance_p is not None and calibration.variance_p < VARIANCE_LEVEL:
        yield f"sentinel blocks are noisier than the calibration (F test, p {calibration.variance_p:.2g})"


def is_enough(calibration: Calibration, at: float) -> bool:
    """Return whether more A/A blocks would not narrow a verdict at the time `at`, in seconds since 1970."""
    enough = calibration.bit_repeatable or calibration.blocks >= ADMITTING_BLOCKS
    return enough and next(standing_problems(calibration, at), None) is None


def mean_p(calibration: Calibration) -> float:
    """Return the two-sided p value of a t test that the mean of d is zero."""
    error = calibration.sd_pct / math.sqrt(calibration.blocks)
    return float(2 * scipy.special.stdtr(calibration.blocks - 1, -abs(calibration.mean_pct) / error))


def mending_command(node_class: str, like: str) -> str:
    """Return the command that measures the noise; `like` is a spec or an ablation of the service."""
    return f"ablate aa {node_class} --like {like}"
