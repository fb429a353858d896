"""What is dropped after a while: logs of ablations that are long over. All that was measured or decided stays."""

import time

from sqlalchemy import Connection, delete, select, update

from service.store.columns import db_now
from service.store.session import Store
from service.store.tables import ablations, log_chunks, trials

TRIALS_AT_ONCE = 200
"""A transaction drops the logs of so many trials, so that nobody waits for it."""
REST_S = 600.0
"""Between two looks for ablations that are old enough."""


class Retention:
    """Drops the logs of one old ablation after another."""

    def __init__(self, store: Store, *, age_s: float) -> None:
        self._store = store
        self._age_s = age_s
        self._rests_until = 0.0

    def round(self) -> bool:
        """Drop a little; return whether there may be more. An age of 0 keeps everything."""
        if self._age_s <= 0 or time.monotonic() < self._rests_until:
            return False
        with self._store.write() as connection:
            ablation_id = _oldest_due(connection, age_s=self._age_s)
            if ablation_id is not None and not _drop_logs(connection, ablation_id):
                done = update(ablations).where(ablations.c.id == ablation_id)
                connection.execute(done.values(logs_dropped_at=db_now()))
        if ablation_id is None:
            self._rests_until = time.monotonic() + REST_S
        return ablation_id is not None


def _oldest_due(connection: Connection, *, age_s: float) -> str | None:
    logged, old = ablations.c.logs_dropped_at.is_(None), ablations.c.finished_at < db_now() - age_s
    due = select(ablations.c.id).where(logged, old)
    found: str | None = connection.execute(due.order_by(ablations.c.finished_at).limit(1)).scalar_one_or_none()
    return found


def _drop_logs(connection: Connection, ablation_id: str) -> int:
    """Drop the logs of some trials; return of how many."""
    logged = select(log_chunks.c.trial_id).where(log_chunks.c.trial_id == trials.c.id)
    some = select(trials.c.id).where(trials.c.ablation_id == ablation_id, logged.exists()).limit(TRIALS_AT_ONCE)
    ids = list(connection.execute(some).scalars())
    connection.execute(delete(log_chunks).where(log_chunks.c.trial_id.in_(ids)))
    return len(ids)
