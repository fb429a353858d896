"""When a worker takes no more blocks and when it drops one, under a clock of our own, against rules in plain words."""

import math
import signal
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.workers.processes import wake_event
from ablate.workers.processes.wake_event import StopFlag, WakeEvent

SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 1.0, 5.0, 20.0]),
        st.one_of(st.sampled_from(SIGNALS), st.sampled_from([None, 3.0, 30.0]), st.just("ends")),
    ),
    max_size=8,
)
"""Seconds that pass, and then a signal, a block that begins with its expected time, or the end of one."""


class Clock:
    now = 100.0

    def read(self) -> float:
        return self.now


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    with mock.patch.object(wake_event.os, "write"):
        yield


class Rules:
    """What the flag has to say, from everything that has happened so far."""

    def __init__(self, drain_s: float, lasts_s: float, idle_s: float) -> None:
        self.drain_s, self.idle_s = drain_s, idle_s
        self.over_at = 100.0 + lasts_s
        self.signals: list[tuple[float, int]] = []
        self.block_until: float | None = None
        self.runs = False
        self.idle_since = 100.0
        self.dropped = False

    def limit(self) -> float:
        """When a block that fits is dropped."""
        times = [self.over_at, *(at + self.drain_s for at, _ in self.signals)]
        times += [at for place, (at, number) in enumerate(self.signals) if place or number == signal.SIGINT]
        return min(times)

    def note(self) -> None:
        if self.signals and self.runs and self.block_until is not None and self.block_until > self.limit():
            self.dropped = True

    def must_end(self, now: float) -> bool:
        is_idle = not self.runs and now - self.idle_since >= self.idle_s
        return bool(self.signals) or now >= self.over_at or is_idle

    def must_drop(self, now: float) -> bool:
        return self.dropped or now >= self.limit()


@given(
    EVENTS,
    st.sampled_from([0.0, 2.0, 10.0]),
    st.sampled_from([math.inf, 15.0, 0.0]),
    st.sampled_from([math.inf, 4.0]),
)
def test_any_order_of_signals_and_blocks_follows_the_rules(
    events: list[tuple[float, object]], drain_s: float, lasts_s: float, idle_s: float
) -> None:
    clock = Clock()
    with mock.patch.object(wake_event.time, "monotonic", clock.read):
        flag = StopFlag(mock.create_autospec(WakeEvent), drain_s=drain_s, lasts_s=lasts_s, idle_s=idle_s)
        rules = Rules(drain_s, lasts_s, idle_s)
        for pause_s, event in events:
            clock.now += pause_s
            if event == "ends":
                flag.ended()
                rules.runs, rules.idle_since = False, clock.now
            elif isinstance(event, signal.Signals):
                flag._on_signal(event, None)
                rules.signals.append((clock.now, event))
            else:
                assert event is None or isinstance(event, float)
                flag.begins(event)
                rules.runs, rules.block_until = True, clock.now + (event or 0.0)
            rules.note()
            assert flag() is rules.must_end(clock.now)
            assert flag.now() is rules.must_drop(clock.now)
            assert flag.left_s() == max(0.0, rules.over_at - clock.now)
