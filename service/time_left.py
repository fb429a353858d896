"""How long the blocks of an ablation still take: as those that settled took, and by the steps of those that run.

Attempts that broke are no pace. A trial costs time outside its steps, before them most: until it tells how long its
steps take, it is held against the clock; from then on it needs that for each step that is left. So the estimate does
not grow while steps advance, and is over with the last one. Where nothing of the kind was measured, nothing is said.
"""

import heapq
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row

from service.store.queue import Pace


def trial_s(row: Row[Any], own_running: Sequence[Row[Any]], pace: Pace | None) -> float | None:
    """Return how long a trial of an ablation takes, in seconds; None where nobody knows.

    By its settled blocks, else by the trials of its running blocks that are over, else at the pace of its node class.
    """
    if row.blocks_done:
        return float(row.settled_s * row.blocks_planned / (row.blocks_done * row.trials_planned))
    over = sum(block.trials_over for block in own_running)
    if over:
        return float(sum(block.trials_over_s or 0.0 for block in own_running) / over)
    return None if pace is None else pace.trial_s


def rest_s(block: Row[Any], one_trial_s: float) -> float:
    """Return how long a running block still takes, in seconds."""
    starting_s = max(0.0, one_trial_s * block.trials_starting - block.starting_s)
    return float(one_trial_s * block.trials_waiting + starting_s + block.steps_s)


def last_end_s(rests: Sequence[float], queued: int, block_s: float) -> float:
    """Return when the last of an ablation's blocks ends: queued ones follow on the running ones, on as many nodes."""
    ends = list(rests) or [0.0]
    heapq.heapify(ends)
    for _ in range(queued):
        heapq.heapreplace(ends, ends[0] + block_s)
    return max(ends)
