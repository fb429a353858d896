import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from service.http import kept_answers
from service.http.kept_answers import KeptAnswers


class Clock:
    """A clock that the test turns on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(kept_answers, "time", SimpleNamespace(monotonic=lambda: self.now))

    def look(self, takes_s: float = 0.0) -> Callable[[], float]:
        """Return a look that takes so long and finds out when it began."""

        def made() -> float:
            began = self.now
            self.now += takes_s
            return began

        return made


def test_an_answer_is_as_old_as_it_may_be_and_no_older_whatever_is_asked_when(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, chance = Clock(monkeypatch), random.Random(10)  # noqa: S311

    def seconds(most: int) -> float:
        return chance.randrange(most * 1024) / 1024  # of which sums are exact

    for _ in range(50):
        fresh_s = chance.choice([0.0, 1 / 1024, 1.0, seconds(10)])
        kept, began = KeptAnswers[int, float](fresh_s=fresh_s, most=100), dict[int, float]()
        for _ in range(100):
            clock.now += chance.choice([0.0, seconds(1), fresh_s])
            key, asked_at = chance.randrange(4), clock.now
            found = kept.get(key, clock.look(takes_s=chance.choice([0.0, seconds(2)])))
            is_kept = key in began and asked_at - began[key] < fresh_s
            assert found == (began[key] if is_kept else asked_at)
            began[key] = found


def test_nothing_is_answered_twice_where_answers_may_not_age(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    kept, numbers = KeptAnswers[str, int](fresh_s=0, most=10), iter(range(5))
    assert [kept.get("a", lambda: next(numbers)) for _ in range(5)] == list(range(5))


def test_the_oldest_answer_makes_room_and_only_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = Clock(monkeypatch), list[int]()
    kept = KeptAnswers[int, int](fresh_s=1, most=3)

    def get(*keys: int) -> list[int]:
        asked.clear()
        assert [kept.get(key, lambda key=key: asked.append(key) or key) for key in keys] == list(keys)
        return asked

    assert get(1, 2, 3, 1, 2, 3) == [1, 2, 3]
    assert get(4, 2, 3, 4, 1) == [4, 1], "1 was the oldest"
    clock.now += 1
    assert get(3, 5, 3) == [3, 5], "3 is new again, and 4 was the oldest"


def test_who_looks_keeps_nobody_waiting_and_a_failure_is_its_own() -> None:
    kept, entered, leave = KeptAnswers[str, str](fresh_s=3600, most=10), threading.Event(), threading.Event()

    def hang() -> str:
        entered.set()
        assert leave.wait(60)
        raise OSError("the database is away")

    with ThreadPoolExecutor(1) as calls:
        hanging = calls.submit(kept.get, "same", hang)
        assert entered.wait(60)
        try:
            assert kept.get("other", lambda: "found") == "found"
            assert kept.get("same", lambda: "found meanwhile") == "found meanwhile"
        finally:
            leave.set()
        with pytest.raises(OSError, match="away"):
            hanging.result(60)
    assert kept.get("same", lambda: "again") == "found meanwhile"


def test_threads_never_hear_what_is_another_keys_or_too_old() -> None:
    fresh_s, most = 0.002, 5
    kept, stop = KeptAnswers[int, tuple[int, float]](fresh_s=fresh_s, most=most), threading.Event()

    def ask(seed: int) -> int:
        chance, count = random.Random(seed), 0  # noqa: S311
        while not stop.is_set():
            key, asked_at = chance.randrange(10), kept_answers.time.monotonic()
            found, began = kept.get(key, lambda key=key: (key, kept_answers.time.monotonic()))
            assert found == key
            assert began > asked_at - fresh_s
            count += 1
        return count

    with ThreadPoolExecutor(8) as calls:
        asking = [calls.submit(ask, seed) for seed in range(8)]
        stop.wait(1.0)
        stop.set()
        assert sum(one.result(60) for one in asking) > 1000
