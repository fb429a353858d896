import math
import os
import signal
import subprocess
from contextlib import suppress

import pytest

from ablate.experiments.system.processes import Mark, children_of, is_alive
from ablate.workers.lease import boot_time_s
from ablate.workers.processes import guardian
from ablate.workers.processes.guardian import Watch
from tests.waiting import until


def test_watch_keeps_the_trials_that_still_run() -> None:
    watch = Watch(1)
    assert watch.read("+10 a\n+11 b\n-10 a\n+12 c\n-99 x\n") == 5
    assert watch.running == {(11, "b"), (12, "c")}


def test_watch_waits_for_the_rest_of_a_line() -> None:
    watch = Watch(1)
    assert [watch.read(text) for text in ("", "+1", "0 a\n+11", " b\n", "\n"[:0])] == [0, 0, 1, 1, 0]
    assert watch.running == {(10, "a"), (11, "b")}


def test_watch_counts_down_to_the_last_deadline() -> None:
    watch = Watch(1)
    assert math.isinf(watch.left_s())
    watch.read(f"until {boot_time_s() + 100!r}\n")
    assert 99 < watch.left_s() <= 100
    watch.read(f"until {boot_time_s() - 1!r}\n")
    assert watch.left_s() == 0.0
    watch.read("until inf\n")
    assert math.isinf(watch.left_s())


def test_watch_ends_the_trainers_before_it_searches_for_strays(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = subprocess.Popen(["sh", "-c", "(sleep 600 & echo; wait) & wait"], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    worker.stdout.readline()
    (server,) = children_of(worker.pid)
    (trainer,) = children_of(server)
    searches = []

    def members(mark: Mark) -> list[int]:
        until(lambda: not is_alive(trainer), what="the end of the trainer")
        searches.append(mark.value)
        return []

    monkeypatch.setattr(Mark, "members", members)
    watch = Watch(worker.pid)
    watch.read(f"+{trainer} a\n")
    try:
        assert trainer in watch.end_overdue()
        assert "a" in searches
    finally:
        worker.kill()
        worker.communicate()


@pytest.mark.parametrize("goes_on", [True, False])
def test_watch_spares_the_next_trial_of_a_worker_that_goes_on(monkeypatch: pytest.MonkeyPatch, goes_on: bool) -> None:
    trainers = "(sleep 600 >/dev/null & echo; wait; sleep 600 >/dev/null & echo; wait) & wait"
    worker = subprocess.Popen(["sh", "-c", trainers], stdout=subprocess.PIPE)
    output = worker.stdout
    assert output is not None
    output.readline()
    (server,) = children_of(worker.pid)
    (trainer,) = children_of(server)
    following: list[int] = []

    def members(_mark: Mark) -> list[int]:
        if not following and output.readline():
            following.extend(children_of(server))
        return []

    monkeypatch.setattr(Mark, "members", members)
    monkeypatch.setattr(guardian, "_has_message", lambda: goes_on)
    watch = Watch(worker.pid)
    watch.read(f"+{trainer} a\n")
    try:
        ended = watch.end_overdue()
        (next_one,) = following
        assert (next_one in ended) is (not goes_on)
        if goes_on:
            assert is_alive(next_one)
        else:
            until(lambda: not is_alive(next_one), what="the end of the next trial")
    finally:
        for pid in (*following, worker.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        worker.communicate()
