"""Schedule: at which numbers of blocks an ablation may answer, and what each of these looks may spend.

Every look tests at its own share of the level, so looking costs nothing that was not set aside.
"""

from collections.abc import Sequence

from experiments.analysis.evidence import Pair
from experiments.design.power import level_shares
from experiments.design.spec import AblationSpec, Blocks


def share_at(blocks: Blocks, counted: int) -> float:
    """Return the share of the level that the look reached with `counted` blocks spends; before the first, its share."""
    looks = blocks.schedule
    reached = [share for look, share in zip(looks, level_shares(looks), strict=True) if look <= counted]
    return reached[-1] if reached else level_shares(looks)[0]


def missing(spec: AblationSpec, pairs: Sequence[Pair]) -> str | None:
    """Return which blocks are missing: those that count must be the first ones, up to one of the looks."""
    looks, counted = spec.design.blocks.schedule, sorted(pair.block_index for pair in pairs)
    if counted == list(range(len(counted))) and len(counted) in looks:
        return None
    due = next((look for look in looks if not counted or look > counted[-1]), looks[-1])
    return f"{len(counted)} of {due} planned blocks counted; missing data fails"
