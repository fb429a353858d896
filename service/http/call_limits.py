"""Calls of workers, imports and submissions run in threads of their own, few at a time."""

from collections.abc import Awaitable, Callable
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import Any, ClassVar

from anyio import CapacityLimiter, to_thread
from fastapi.routing import APIRoute

from service.http.patient_json import LargeBodyRoute
from service.threads import IMPORTS_AT_ONCE, SUBMISSIONS_AT_ONCE, WORKERS_AT_ONCE


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
