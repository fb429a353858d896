"""How many calls run at once, each in a thread: those of workers, imports and submissions have threads of their own.

A call that holds locks of the database is not kept from its next statement by dozens of others that compute, and a
fleet that begins at once, or a dozen large imports, keep nobody who reads waiting. More threads than these answer
nothing sooner: all of them share one interpreter.
"""

from collections.abc import Awaitable, Callable
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import Any, ClassVar

from anyio import CapacityLimiter, to_thread
from fastapi.routing import APIRoute

from service.patient_json import LargeBodyRoute

WORKERS_AT_ONCE = 8
IMPORTS_AT_ONCE = 2
"""Each may have tens of thousands of receipts to verify."""
SUBMISSIONS_AT_ONCE = 8
"""Plans that are only looked at are among them: a large one takes seconds."""
OTHERS_AT_ONCE = 12
"""All other requests, which read."""


class CallLimits:
    """Lets few calls of each kind run at a time in this process, in the order in which they came."""

    def __init__(self) -> None:
        self.workers = CapacityLimiter(WORKERS_AT_ONCE)
        self.imports = CapacityLimiter(IMPORTS_AT_ONCE)
        self.submissions = CapacityLimiter(SUBMISSIONS_AT_ONCE)


class _LimitedRoute(APIRoute):
    """A route whose calls have a limit of their own; its function takes `services`."""

    limit: ClassVar[str]
    """Which of `CallLimits`."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, _in_turn(endpoint, self.limit), **options)


class WorkerRoute(_LimitedRoute, LargeBodyRoute):
    """A route for workers."""

    limit = "workers"


class ImportRoute(_LimitedRoute, LargeBodyRoute):
    """A route that takes bundles."""

    limit = "imports"


class SubmissionRoute(_LimitedRoute):
    """A route that plans a spec."""

    limit = "submissions"


def _in_turn(call: Callable[..., Any], limit: str) -> Callable[..., Awaitable[Any]]:
    if iscoroutinefunction(call):
        raise TypeError(f"{call.__name__} is asynchronous; allowed: a function that runs in a thread")

    @wraps(call)
    async def wait_and_run(**values: Any) -> Any:
        limiter: CapacityLimiter = getattr(values["services"].call_limits, limit)
        return await to_thread.run_sync(partial(call, **values), limiter=limiter)

    return wait_and_run
