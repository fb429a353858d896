"""The wait for quiet cores: drawn loads on a pretended clock, against the looks counted one by one."""

import os
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.workers.blocks.surroundings import ANY_LOAD, FIRST_LOOK_S, LOOK_S, CoreLoad, Patience, Quiet, read_load
from ablate.workers.errors import BlockStopped
from ablate.workers.lease import StopReason

CORES = 2


class Machine:
    """Cores whose busy share is drawn for each look; time passes in pauses only."""

    def __init__(self, shares: list[float]) -> None:
        self.shares, self.at_s, self.busy_s = list(shares), 10.0, 0.0
        self.messages: list[str | None] = []
        self.looks: list[float] = []

    def pause(self, seconds: float) -> None:
        share = self.shares.pop(0) if self.shares else 1.0
        self.looks.append(share)
        self.at_s += seconds
        self.busy_s += share * seconds * CORES

    def read(self) -> CoreLoad:
        return CoreLoad(at_s=self.at_s, busy_s=self.busy_s, cores=CORES)

    def wait(self, limit: float, most_s: float) -> bool:
        quiet = Quiet(pause=self.pause, says=self.messages.append, read=self.read, processes=dict)
        return quiet.wait(limit, most_s=most_s)


@given(
    st.lists(st.integers(0, 100).map(lambda percent: percent / 100), max_size=30),
    st.integers(1, 100).map(lambda percent: percent / 100),
    st.floats(0, 60),
)
def test_it_waits_for_the_first_quiet_look_and_never_longer_than_it_may(
    shares: list[float], limit: float, most_s: float
) -> None:
    machine = Machine(shares)
    limit += 1e-6  # sums of drawn shares are not exact
    quiet = machine.wait(limit, most_s)
    if limit >= ANY_LOAD or most_s <= 0:
        assert (quiet, machine.looks, machine.messages) == (True, [], [])
        return
    assert all(share > limit for share in machine.looks[:-1])
    assert quiet is (machine.looks[-1] <= limit)
    waited = machine.at_s - 10.0
    assert waited <= max(most_s, FIRST_LOOK_S) + 1e-6
    assert quiet or waited >= most_s - FIRST_LOOK_S - 1e-6
    assert len(machine.looks) <= 2 + (most_s - FIRST_LOOK_S) / LOOK_S or len(machine.looks) == 1
    lines = [text for text in machine.messages if text is not None]
    assert machine.messages == ([] if len(machine.looks) == 1 and quiet else [*lines, None])
    assert all("placement.max_foreign_load allows" in text for text in lines)


def test_a_block_that_has_to_stop_waits_no_more_and_says_so() -> None:
    machine = Machine([])

    def pause(seconds: float) -> None:
        machine.pause(seconds)
        if len(machine.looks) == 3:
            raise BlockStopped(StopReason.CANCELLED)

    with pytest.raises(BlockStopped):
        Quiet(pause=pause, says=machine.messages.append, read=machine.read, processes=dict).wait(0.25, most_s=60.0)
    assert machine.messages[-1] is None


def test_the_counters_of_this_machine_show_the_work_of_this_process() -> None:
    before, began = read_load(), time.process_time()
    while time.process_time() - began < 0.05:
        pass
    after = read_load()
    assert after.cores == len(os.sched_getaffinity(0))
    assert after.busy_s - before.busy_s >= 0.03
    assert 0 < after.share_since(before) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_a_worker_waits_once_in_vain_and_again_only_after_quiet_cores(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - draws that repeat
    patience, in_vain = Patience(), False
    for _ in range(30):
        is_quiet, waits = draw.random() < 0.3, []

        class Look:
            def wait(self, _limit: float, *, most_s: float) -> bool:
                waits.append(most_s)  # noqa: B023 - it is called in this turn
                return is_quiet  # noqa: B023

        patience.wait(Look(), 0.25, most_s=60.0)  # type: ignore[arg-type]
        assert waits == [FIRST_LOOK_S if in_vain else 60.0]
        in_vain = not is_quiet
