"""What decides whether an ablation is over: its state, the counters of its blocks, and what it has used."""

from typing import Any

from sqlalchemy import ColumnElement, select

from experiments.outcomes import BlockState
from service.store.nodes.placement import BUSY_DEVICES
from service.store.tables import ablations, blocks


def counters(ablation: ColumnElement[str]) -> tuple[ColumnElement[Any], ...]:
    """Return columns of the ablation with this id; `devices` are those that one of its blocks keeps busy.

    The id has to be a value: what a change returns names columns without their table on SQLite.
    """
    first = select(BUSY_DEVICES).where(blocks.c.ablation_id == ablation, blocks.c["index"] == 0)
    devices = first.scalar_subquery().label("devices")
    own = (ablations.c.id, ablations.c.state, ablations.c.device_s, ablations.c.device_minutes)
    return (*own, devices, *(ablations.c[f"blocks_{state}"] for state in BlockState))
