"""The grid of an ablation: a row for each arm, a column for each block, a trial's state in each cell."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from ablate.experiments.block_numbers import block_number
from ablate.experiments.outcomes import BlockState, Outcome, TrialState
from ablate.experiments.reporting.table import Tone
from ablate.service.schemas.ablations import AblationPublic
from ablate.service.store.ablations.ablations import grid_trials

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
    TrialState.QUEUED: GridCell(sign="\N{MIDDLE DOT}", word="queued", tone=Tone.OPEN),
    BlockState.HELD: GridCell(sign="\N{WHITE CIRCLE}", word="held", tone=Tone.OPEN),
    TrialState.RUNNING: GridCell(sign="\N{BLACK RIGHT-POINTING TRIANGLE}", word="running", tone=Tone.NEUTRAL),
    TrialState.CANCELLED: GridCell(sign="\N{EN DASH}", word="cancelled", tone=Tone.OPEN),
    TrialState.FAILED: GridCell(sign="\N{MULTIPLICATION SIGN}", word="failed", tone=Tone.BROKEN),
    Outcome.MEASURED: GridCell(sign="\N{CHECK MARK}", word="measured", tone=Tone.GOOD),
    Outcome.OOM: GridCell(sign="\N{BLACK SQUARE}", word="oom", tone=Tone.BAD),
    Outcome.TIMEOUT: GridCell(sign="T", word="timeout", tone=Tone.BAD),
    Outcome.REFUSED: GridCell(sign="\N{CIRCLED DIVISION SLASH}", word="refused", tone=Tone.BROKEN),
    Outcome.INVALID: GridCell(sign="!", word="invalid", tone=Tone.BROKEN),
}
"""By a done trial's outcome, else by its state; `held` while its block is held."""
_HAS_RUN = GridCell(sign="\N{BLACK CIRCLE}", word="ran", tone=Tone.NEUTRAL)
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
    return make_grid(arms, grid_trials(connection, row.id, _first_shown(row, width), width), row.blocks.planned)


def _first_shown(row: AblationPublic, width: int) -> int:
    over = row.blocks.done + row.blocks.failed
    return max(0, min(over - width // 2, row.blocks.planned - width))


def make_grid(arms: Sequence[str], trials: Sequence[Row[Any]], planned: int) -> Grid:
    """Return the grid of trials with the columns of `grid_trials`."""
    indices = sorted({trial.block_index for trial in trials})
    cells = {(trial.arm, trial.block_index): _cell(trial) for trial in trials}
    return Grid(
        numbers=tuple(map(block_number, indices)),
        rows=tuple((arm, tuple(cells.get((arm, index), _NOTHING) for index in indices)) for arm in arms),
        planned=planned,
    )


def _cell(trial: Row[Any]) -> GridCell:
    if trial.state == TrialState.DONE:
        return STATES[trial.outcome]
    if trial.state == TrialState.RUNNING and not trial.runs_now:
        return _HAS_RUN
    is_held = trial.state == TrialState.QUEUED and trial.block_state == BlockState.HELD
    return STATES[BlockState.HELD if is_held else trial.state]
