"""What the blocks of an ended ablation came to, in a sentence: one counts as done whatever its trials measured."""

import json
from typing import Any

from sqlalchemy import BindParameter, Connection, Row, Select, bindparam, func, select

from experiments.outcomes import BASELINE, VARIANT, BlockState, Outcome
from experiments.reporting import wording
from service.store.tables import blocks, receipts, trials

_NAMED = 3
"""Arms that are named, each with an outcome."""
_LONGEST = 200
"""Characters of a reason."""
_ID: BindParameter[str] = bindparam("ablation", type_=trials.c.ablation_id.type)
_OF_ABLATION = (trials.c.ablation_id == _ID, trials.c.outcome.is_not(None))
_ARM = (trials.c.role, trials.c.arm, trials.c.outcome)
_OUTCOMES = select(*_ARM, func.count().label("trials")).where(*_OF_ABLATION).group_by(*_ARM)
_FIRST = (
    select(receipts.c.payload)
    .join(trials, trials.c.id == receipts.c.trial_id)
    .where(*_OF_ABLATION, trials.c.outcome != Outcome.MEASURED)
    .order_by(trials.c.block_index, trials.c.position)
    .limit(1)
)
_FAILED = (
    select(blocks.c.message, func.count().over().label("blocks"))
    .where(blocks.c.ablation_id == _ID, blocks.c.state == BlockState.FAILED)
    .order_by(blocks.c["index"])
    .limit(1)
)
"""The first of the failed blocks, and how many there are."""


def _comparable() -> Select[Any]:
    other = trials.alias("other")
    measured = (trials.c.role == VARIANT, trials.c.outcome == Outcome.MEASURED)
    beside = (other.c.block_id == trials.c.block_id, other.c.role == BASELINE, other.c.outcome == Outcome.MEASURED)
    own = select(func.count(trials.c.block_index.distinct())).where(trials.c.ablation_id == _ID, *measured)
    return own.where(select(other.c.id).where(*beside).exists())


_COMPARABLE = _comparable()


def ended_words(connection: Connection, ablation_id: str, *, done: int, failed: int, cancelled: int) -> str:
    """Return for example "6 blocks done, 0 failed", and why trials of them are no measurements where some are not.

    Looks at every trial, once in the life of an ablation.
    """
    found = connection.execute(_OUTCOMES, {"ablation": ablation_id}).all()
    without = sorted((row for row in found if row.outcome != Outcome.MEASURED), key=_baseline_first)
    few = _few(connection, ablation_id, done) if without else []
    left = [f"{cancelled:,} not run"] if cancelled else []
    counts = ", ".join([f"{wording.counted(done, 'block')} done", *few, f"{failed:,} failed", *left])
    return f"{counts}: {_why(connection, ablation_id, without)}" if without else counts


def failed_words(connection: Connection, ablation_id: str) -> str:
    """Return for example "no block counted, 6 failed; the first: ..." with the reason that ended its first block."""
    found = connection.execute(_FAILED, {"ablation": ablation_id}).first()
    first = f"; the first: {wording.shorten(found.message, _LONGEST)}" if found and found.message else ""
    return f"no block counted, {found.blocks if found else 0:,} failed{first}"


def _baseline_first(row: Row[Any]) -> tuple[bool, str, str]:
    return row.role != BASELINE, row.arm, row.outcome


def _few(connection: Connection, ablation_id: str, done: int) -> list[str]:
    """Say in how many blocks the baseline and a variant measured, unless they did in all."""
    number = connection.execute(_COMPARABLE, {"ablation": ablation_id}).scalar_one()
    return [] if number == done else [f"{f'{number:,}' if number else 'none'} of them comparable"]


def _why(connection: Connection, ablation_id: str, without: list[Row[Any]]) -> str:
    """Say which arms did not measure, and why the first trial did not."""
    named = [f"{row.arm} {row.outcome} in {row.trials:,}" for row in without[:_NAMED]]
    more = [f"{len(without) - _NAMED} more"] if len(without) > _NAMED else []
    message = json.loads(connection.execute(_FIRST, {"ablation": ablation_id}).scalar_one())["message"]
    first = f"; the first: {wording.shorten(message, _LONGEST)}" if message else ""
    return wording.listed([*named, *more]) + first
