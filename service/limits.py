"""A token bucket for every bearer token: steady rate, some burst, and an honest Retry-After."""

import math
import time

from service.errors import TooManyRequests

MAX_BUCKETS = 10_000


class RateLimiter:
    """Counts requests; used from the event loop's thread only."""

    def __init__(self, *, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._buckets: dict[str, tuple[float, float]] = {}

    def spend(self, token_id: str) -> None:
        """Take one request from the token's bucket. Raises TooManyRequests when it is empty."""
        now = time.monotonic()
        left, then = self._buckets.get(token_id, (float(self._burst), now))
        left = min(float(self._burst), left + (now - then) * self._per_s)
        if left < 1.0:
            wait_s = math.ceil((1.0 - left) / self._per_s)
            raise TooManyRequests(
                f"this token sent more than {self._per_s:g} requests per second; wait {wait_s} s",
                headers={"Retry-After": str(wait_s)},
            )
        if len(self._buckets) >= MAX_BUCKETS:
            self._buckets.clear()
        self._buckets[token_id] = (left - 1.0, now)
