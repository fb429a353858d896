"""One look at the database for all streams that stand at the same place: a hundred readers cost what one does."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

_Found = TypeVar("_Found")


class SharedLooks(Generic[_Found]):
    """What looks found, by place; used from the event loop's thread only.

    A place must name everything that a look's result depends on, so that whatever is found later at the same place
    is news of another place. Looks that failed are forgotten.
    """

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._tasks: OrderedDict[Hashable, asyncio.Future[_Found]] = OrderedDict()

    async def get(self, place: Hashable, look: Callable[[], Awaitable[_Found]]) -> _Found:
        """Return what is found at a place; all who ask hear the same, an error too."""
        task = self._tasks.get(place)
        if task is None or (task.done() and _has_failed(task)):
            task = self._tasks[place] = asyncio.ensure_future(look())
            while len(self._tasks) > self._most:
                self._tasks.popitem(last=False)
        return await asyncio.shield(task)  # who goes away does not end it for the others


def _has_failed(task: "asyncio.Future[_Found]") -> bool:
    return task.cancelled() or task.exception() is not None
