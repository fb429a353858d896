import os
import subprocess
import sys
import time

import psutil

from experiments.records.receipts import ForeignProcess
from workers.blocks.surroundings import MOST, busiest, process_times


def test_a_process_that_is_busy_meanwhile_is_named() -> None:
    before = process_times()
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        watched = psutil.Process(other.pid)
        while watched.cpu_times().user < 0.3:
            time.sleep(0.05)
        after = process_times()
    finally:
        other.kill()
        other.wait()
    used = {key[0]: seconds for key, (_, seconds) in after.items()}
    assert used[other.pid] >= 0.3
    found = busiest({**before}, {key: value for key, value in after.items() if key[0] in (other.pid, os.getpid())})
    assert other.pid in {one.pid for one in found}


def test_busiest_counts_what_was_used_in_between_most_first_and_not_many() -> None:
    before = {(1, 0.0): ("init", 50.0), (2, 0.0): ("editor", 10.0), (3, 0.0): ("idle", 7.0)}
    after = {
        (1, 0.0): ("init", 50.2),
        (2, 0.0): ("editor", 14.0),
        (3, 0.0): ("idle", 7.01),
        (3, 9.0): ("reused", 1.5),
        (5, 1.0): ("compiler", 9.0),
    }
    assert busiest(before, after) == (
        ForeignProcess(pid=5, name="compiler", cpu_s=9.0),
        ForeignProcess(pid=2, name="editor", cpu_s=4.0),
        ForeignProcess(pid=3, name="reused", cpu_s=1.5),
    )
    assert [one.pid for one in busiest(before, after, exclude={5, 3})] == [2, 1]
    assert len(busiest(before, after)) == MOST
    assert busiest(after, after) == ()
