"""A rate limit for every bearer token: steady rate, some burst, and an honest Retry-After.

A token bucket in the form of the generic cell rate algorithm: what is kept of a token is the moment from which its
whole burst is there again. The package `limits` has no bucket with a burst, and its timer thread costs 30 to 90
microseconds of processor time a request, where this takes one; see docs/LOG.md.
"""

import math
import time

from service.errors import TooManyRequests

_NS = 1_000_000_000


class RateLimiter:
    """Counts the requests of known tokens, in whole nanoseconds; used from the event loop's thread only."""

    def __init__(self, *, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._interval_ns = round(_NS / per_s)
        self._tolerance_ns = (burst - 1) * self._interval_ns
        self._whole_at_ns: dict[str, int] = {}

    def spend(self, token_id: str) -> None:
        """Count one request of the token. Raises TooManyRequests when its burst is used up."""
        now = time.monotonic_ns()
        whole_at = max(self._whole_at_ns.get(token_id, now), now)
        wait_ns = whole_at - now - self._tolerance_ns
        if wait_ns > 0:
            wait_s = math.ceil(wait_ns / _NS)
            raise TooManyRequests(
                f"this token sent more than {self._per_s:g} requests per second; wait {wait_s} s",
                headers={"Retry-After": str(wait_s)},
            )
        self._whole_at_ns[token_id] = whole_at + self._interval_ns
