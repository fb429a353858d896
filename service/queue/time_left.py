"""How long the blocks of an ablation still take: as those that settled took, and by the steps of those that run.

Attempts that broke are no pace. A trial costs time outside its steps, before them most: until it tells how long its
steps take, it is held against the clock; from then on it needs that for each step that is left. So the estimate does
not grow while steps advance, and is over with the last one. Where nothing of the kind was measured, nothing is said.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Row

from service.store.ablations.queue import Pace


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


def affordable(queued: int, running: int, *, block_s: float, budget_s: float, nodes: int) -> int:
    """Return how many of the `queued` blocks start before the rest of the budget is used up, in seconds of a block.

    What counts is what has ended: the last block that starts may go over, and so may those that run beside it.
    """
    if block_s <= 0:
        return queued
    starts = math.ceil(max(0.0, budget_s) / block_s) + max(1, nodes) - 1
    return max(0, min(queued, starts - running)) if budget_s > 0 else 0


def last_end_s(rests: Sequence[float], nodes: int, jobs: Iterable[tuple[int, float]]) -> float:
    """Return when the last of `jobs` ends that follow on what runs: each on the node that is free first.

    `rests` are what the nodes that run something need for it; `jobs` are pairs of how many and how many seconds each.
    """
    ends = [*rests, *[0.0] * (max(1, nodes) - len(rests))]
    heapq.heapify(ends)
    last = 0.0
    for count, each_s in jobs:
        last = _take(ends, count, each_s) if count else last
    return last


def _take(ends: list[float], count: int, each_s: float) -> float:
    """Give `count` equal jobs out; return when the last one ends. Nodes that end together get the same number."""
    last, top = ends[0], max(ends)
    while count and top - ends[0] > each_s:
        last, count = ends[0] + each_s, count - 1
        heapq.heapreplace(ends, last)
    rounds, count = divmod(count, len(ends))
    if rounds:
        ends[:] = [end + rounds * each_s for end in ends]
        last = max(ends)
    for _ in range(count):
        last = ends[0] + each_s
        heapq.heapreplace(ends, last)
    return last
