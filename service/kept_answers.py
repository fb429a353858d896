"""Answers of the last moment, by what they depend on: many who ask one after another cost what one does."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Answer = TypeVar("_Answer")


class KeptAnswers(Generic[_Key, _Answer]):
    """What was found lately, used from any thread; a key names everything that its answer depends on, but time.

    Nobody waits for another one's look: those who come while there is no answer look themselves. They are as few as may
    run at once, and one whose look hangs or fails concerns nobody else.
    """

    def __init__(self, *, fresh_s: float, most: int) -> None:
        self._fresh_s = fresh_s
        self._most = most
        self._answers: OrderedDict[_Key, tuple[float, _Answer]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _Key, look: Callable[[], _Answer]) -> _Answer:
        """Return what a look found that began at most `fresh_s` ago, or begins now."""
        asked_at = time.monotonic()
        with self._lock:
            known = self._answers.get(key)
        if known is not None and asked_at < known[0]:
            return known[1]
        found = look()
        with self._lock:
            self._answers[key] = (asked_at + self._fresh_s, found)
            self._answers.move_to_end(key)
            if len(self._answers) > self._most:
                self._answers.popitem(last=False)
        return found
