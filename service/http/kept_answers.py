"""Answers of the last moment, by what they depend on: many who ask one after another cost what one does."""

import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from cachetools import TLRUCache

_Key = TypeVar("_Key", bound=Hashable)
_Answer = TypeVar("_Answer")


class KeptAnswers(Generic[_Key, _Answer]):
    """What was found lately, used from any thread; a key names everything that its answer depends on, but time.

    Nobody waits for another one's look: those who come while there is no answer look themselves. They are as few as may
    run at once, and one whose look hangs or fails concerns nobody else.
    """

    def __init__(self, *, fresh_s: float, most: int) -> None:
        self._answers: TLRUCache[_Key, tuple[float, _Answer]] = TLRUCache(
            most, ttu=lambda _, answer, __: answer[0] + fresh_s, timer=time.monotonic
        )
        self._lock = threading.Lock()

    def get(self, key: _Key, look: Callable[[], _Answer]) -> _Answer:
        """Return what a look found that began at most `fresh_s` ago, or begins now."""
        with self._lock:
            known = self._answers.get(key)
        if known is not None:
            return known[1]
        asked_at = time.monotonic()
        found = look()
        with self._lock:
            self._answers[key] = asked_at, found
        return found
