"""One look at the database for all streams that stand at the same place: a hundred readers cost what one does."""

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from service.http.shared_answer import SharedAnswer

_Found = TypeVar("_Found")


class SharedLooks(Generic[_Found]):
    """What looks found, by place; used from the event loop's thread only.

    A place that is settled names everything that a look's result depends on, so that whatever is found later at the
    same place is news of another place: what was found there is kept. Of any other place only those hear who ask while
    the look is made. Looks that failed are made again.
    """

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._answers: OrderedDict[Hashable, SharedAnswer[_Found]] = OrderedDict()

    async def get(self, place: Hashable, look: Callable[[], Awaitable[_Found]], *, is_settled: bool = True) -> _Found:
        """Return what is found at a place; all who ask hear the same, an error too."""
        answer = self._answers.get(place)
        if answer is None:
            answer = self._answers[place] = SharedAnswer(look, fresh_s=math.inf if is_settled else 0.0)
            if len(self._answers) > self._most:
                self._answers.popitem(last=False)
        return await answer.get()
