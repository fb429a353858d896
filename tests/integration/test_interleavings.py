"""Drawn pairs of operations on PostgreSQL, one before every statement of the other; `make interleavings` tries all."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.interleavings.rig import faults
from tests.interleavings.world import OPERATIONS, WORLDS, pairs, world

PAIRS = 15
KNOWN = (
    ("both running", "report", "report first"),  # each held the ablation by a key and wanted it whole: a deadlock
    ("both running", "report first", "report"),
    ("lapsed", "report", "tick"),  # the report's lease ended between two reads: 409 for a result that counts
    ("lapsed", "cancel", "tick"),  # the block came back to the queue of a cancelled ablation, for ever
    ("running", "report", "report"),  # the repeated report was stale
    ("both running", "claim again", "break"),  # the attempt ended between two reads: 409, although a device was free
    ("spent", "priority", "report"),  # the ablation ended between two reads of its page: 500
)
"""Pairs that failed once: world, stopped operation, the other one."""


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_drawn_pairs_end_as_one_after_the_other(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    drawn = random.Random(20261126).sample(pairs(WORLDS, OPERATIONS, OPERATIONS), PAIRS)  # noqa: S311 - the same pairs
    tried = [*KNOWN, *drawn]
    seen: list[str] = []
    pauses = 0
    with ExitStack() as stack:
        worlds = {name: stack.enter_context(world(name, tmp_path / name)) for name in {pair[0] for pair in tried}}
        for name, first, second in tried:
            for fault in faults(worlds[name], first, second, pool):
                pauses += 1
                if fault is not None:
                    seen.append(str(fault))
    assert "\n".join(seen) == ""
    assert pauses > len(tried)
