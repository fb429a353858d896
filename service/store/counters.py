"""What decides whether an ablation is over: its state, the counters of its blocks, and what it has used."""

from typing import Any

from sqlalchemy import ColumnElement, select

from experiments.outcomes import BlockState
from service.store.placement import BUSY_DEVICES
from service.store.tables import ablations, blocks

_FIRST = select(BUSY_DEVICES).where(blocks.c.ablation_id == ablations.c.id, blocks.c["index"] == 0)

COUNTERS: tuple[ColumnElement[Any], ...] = (
    ablations.c.id,
    ablations.c.state,
    ablations.c.device_s,
    ablations.c.device_minutes,
    _FIRST.scalar_subquery().label("devices"),
    *(ablations.c[f"blocks_{state}"] for state in BlockState),
)
"""Columns of an ablation; `devices` are those that one of its blocks keeps busy."""
