"""What an A/A ablation found: the noise of every device that ran it, and what can be asked of one now."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from experiments.analysis.dependence import dependence_of, widening
from experiments.analysis.statistics import percent
from experiments.design.power import FEWER_BLOCKS, detectable_per_sd
from experiments.reporting import wording

if TYPE_CHECKING:
    from experiments.records.calibration import Calibration
    from service.schemas.calibrations import CalibrationList, CalibrationPublic

_ASKED = (6, 20, 60)
"""Numbers of blocks for which it is told what they find."""
WORTH_ADVICE_PCT = 5.0
"""sd from which a quieter machine or a longer window is what helps."""


def lines(known: "CalibrationList", ablation_id: str) -> Iterator[str]:
    """Yield what is known of every device that ran blocks of this A/A ablation."""
    own = [one for one in known.items if ablation_id in one.calibration.ablations]
    if not own:
        yield f"It gave no noise: not two of its blocks measured. Why: ablate show {ablation_id}"
    for one in own:
        yield from _of_device(one)


def _of_device(one: "CalibrationPublic") -> Iterator[str]:
    found = one.calibration
    sd, most = wording.size_percent(found.sd_pct), wording.size_percent(found.sd_upper_pct)
    noise = f"neighbouring trials of one arm differ with an sd of {sd} (at most {most})"
    yield f"{found.key.node_class} {found.key.device_serial}: {wording.counted(found.blocks, 'A/A block')}; {noise}"
    if one.problem is not None:
        yield f"  no word about speed yet: {one.problem}; {one.mended_by}"
        return
    finds = ", ".join(f"{blocks} blocks find {_effect(found, blocks)}" for blocks in _ASKED)
    yield f"  speed can be asked about now, of one variant: {finds}"
    if found.sd_pct >= WORTH_ADVICE_PCT:
        yield f"  {FEWER_BLOCKS}"


def _effect(found: "Calibration", blocks: int) -> str:
    """Write the effect that so many blocks find with 80 % power at the upper bound of the noise."""
    sd = found.sd_upper_pct / 100 * widening(dependence_of([found]), blocks)
    return wording.size_percent(percent(detectable_per_sd(blocks) * sd))
