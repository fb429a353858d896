"""Schedule: at which numbers of blocks an ablation may answer, and what each of these looks may spend.

Every look tests at its own share of the level, so looking costs nothing that was not set aside.
"""

from collections.abc import Iterator, Sequence, Set

from experiments.analysis.evidence import Pair
from experiments.block_numbers import block_list
from experiments.design.power import level_shares
from experiments.design.spec import AblationSpec, Blocks
from experiments.records.circumstances import Circumstances


def share_at(blocks: Blocks, counted: int) -> float:
    """Return the share of the level that the look reached with `counted` blocks spends; before the first, its share."""
    looks = blocks.schedule
    reached = [share for look, share in zip(looks, level_shares(looks), strict=True) if look <= counted]
    return reached[-1] if reached else level_shares(looks)[0]


def missing(spec: AblationSpec, pairs: Sequence[Pair], known: Circumstances) -> str | None:
    """Return which blocks are missing and why: those that count must be the first ones, up to one of the looks."""
    looks, counted = spec.design.blocks.schedule, sorted(pair.block_index for pair in pairs)
    if counted == list(range(len(counted))) and len(counted) in looks:
        return None
    due = next((look for look in looks if not counted or look > counted[-1]), looks[-1])
    why = "; ".join(_why(set(range(due)) - set(counted), known))
    return f"{len(counted)} of {due} planned blocks counted{f': {why}' if why else '; missing data fails'}"


def _why(absent: Set[int], known: Circumstances) -> Iterator[str]:
    """Say what ended an ablation before all blocks had run, and how absent blocks broke."""
    if known.not_run is not None:
        yield known.not_run
    broken = [attempt for attempt in known.attempts if attempt.block_index in absent]
    if broken:
        places, last = sorted({attempt.block_index for attempt in broken}), broken[-1]
        blocks = "blocks" if len(places) > 1 else "block"
        yield f"{blocks} {block_list(places)} broke ({last.failure_class}: {last.message})"
