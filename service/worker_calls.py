"""Calls of workers run in few threads of their own, in the order in which they came.

A call that holds locks of the database is not kept from its next statement by dozens of others that compute, and a
fleet that begins at once keeps nobody else's request waiting. More threads than these answer nothing sooner: all of
them share one interpreter.
"""

from collections.abc import Awaitable, Callable
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import Any

from anyio import to_thread

from service.patient_json import LargeBodyRoute

AT_ONCE = 8
"""Calls of workers."""
OTHERS_AT_ONCE = 12
"""Requests of anybody else."""


class WorkerRoute(LargeBodyRoute):
    """A route for workers; its function takes `services`."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, _in_turn(endpoint), **options)


def _in_turn(call: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    if iscoroutinefunction(call):
        raise TypeError(f"{call.__name__} is asynchronous; allowed: a function that runs in a thread")

    @wraps(call)
    async def wait_and_run(**values: Any) -> Any:
        return await to_thread.run_sync(partial(call, **values), limiter=values["services"].worker_calls)

    return wait_and_run
