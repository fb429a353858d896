"""The grid of an ablation: a row for each arm, a column for each block, a trial's state in each cell."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from experiments.block_numbers import block_number
from experiments.outcomes import BlockState, Outcome, TrialState
from experiments.reporting.table import Tone
from service.http.serializers import block_public, trial_public
from service.schemas.ablations import AblationPublic, BlockPublic, TrialPublic
from service.store.ablations import ablations

MOST_CELLS = 900
"""Larger grids show the blocks around the first unfinished one."""
FEWEST_BLOCKS = 6


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """The state of one trial."""

    sign: str
    word: str
    tone: Tone


STATES: dict[str, GridCell] = {
    TrialState.QUEUED: GridCell(sign="\N{MIDDLE DOT}", word="waits", tone=Tone.OPEN),
    BlockState.HELD: GridCell(sign="\N{WHITE CIRCLE}", word="held", tone=Tone.OPEN),
    TrialState.RUNNING: GridCell(sign="\N{BLACK RIGHT-POINTING TRIANGLE}", word="runs", tone=Tone.NEUTRAL),
    TrialState.CANCELLED: GridCell(sign="\N{EN DASH}", word="cancelled", tone=Tone.OPEN),
    TrialState.FAILED: GridCell(sign="\N{MULTIPLICATION SIGN}", word="failed", tone=Tone.BROKEN),
    Outcome.MEASURED: GridCell(sign="\N{CHECK MARK}", word="measured", tone=Tone.GOOD),
    Outcome.OOM: GridCell(sign="\N{BLACK SQUARE}", word="out of memory", tone=Tone.BAD),
    Outcome.TIMEOUT: GridCell(sign="T", word="timed out", tone=Tone.BAD),
    Outcome.REFUSED: GridCell(sign="\N{CIRCLED DIVISION SLASH}", word="refused", tone=Tone.BROKEN),
    Outcome.INVALID: GridCell(sign="!", word="invalid", tone=Tone.BROKEN),
}
"""By a done trial's outcome, else by its state; `held` while its block is held."""
_HAS_RUN = GridCell(sign="\N{BLACK CIRCLE}", word="ran, its block goes on", tone=Tone.NEUTRAL)
_NOTHING = GridCell(sign="", word="not planned", tone=Tone.OPEN)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The visible part of the grid."""

    numbers: tuple[int, ...]
    """Of the blocks, from 1."""
    rows: tuple[tuple[str, tuple[GridCell, ...]], ...]
    """Pairs of an arm and its cells."""
    planned: int

    @property
    def legend(self) -> tuple[GridCell, ...]:
        """One cell of every kind that occurs."""
        return tuple({cell.word: cell for _, cells in self.rows for cell in cells}.values())


def read_grid(connection: Connection, row: AblationPublic, arms: Sequence[str]) -> Grid:
    """Read the visible blocks of an ablation, with their trials."""
    width = max(FEWEST_BLOCKS, MOST_CELLS // len(arms))
    first = _first_shown(row, width)
    blocks = ablations.list_blocks(connection, (first - 1,), width, ablation_id=row.id)
    before = (first - 1, len(arms))
    trials = ablations.list_trials(connection, before, width * len(arms), ablation_id=row.id)
    return make_grid(
        arms, [block_public(block) for block in blocks], [trial_public(one) for one in trials], row.blocks.planned
    )


def _first_shown(row: AblationPublic, width: int) -> int:
    over = row.blocks.done + row.blocks.failed
    return max(0, min(over - width // 2, row.blocks.planned - width))


def make_grid(arms: Sequence[str], blocks: Sequence[BlockPublic], trials: Sequence[TrialPublic], planned: int) -> Grid:
    """Return the grid of these blocks."""
    held = {block.index for block in blocks if block.state is BlockState.HELD}
    cells = {(one.arm, one.block_index): _HAS_RUN if one.had_its_turn else _cell(one, held) for one in trials}
    return Grid(
        numbers=tuple(block_number(block.index) for block in blocks),
        rows=tuple((arm, tuple(cells.get((arm, block.index), _NOTHING) for block in blocks)) for arm in arms),
        planned=planned,
    )


def _cell(trial: TrialPublic, held: set[int]) -> GridCell:
    if trial.state is TrialState.DONE and trial.outcome is not None:
        return STATES[trial.outcome]
    state: Any = BlockState.HELD if trial.state is TrialState.QUEUED and trial.block_index in held else trial.state
    return STATES[state]
