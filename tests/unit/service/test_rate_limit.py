import numpy as np
import pytest

from ablate.service.errors import TooManyRequests
from ablate.service.http.authentication import RateLimiter

SECOND = 10**9


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, now_ns: int) -> None:
        self.now_ns = now_ns
        monkeypatch.setattr("ablate.service.http.authentication.time.monotonic_ns", lambda: self.now_ns)


def _retry_after_s(limiter: RateLimiter, token: str) -> int:
    """The seconds that a refusal names, 0 when the request is allowed."""
    try:
        limiter.spend(token)
    except TooManyRequests as refusal:
        return int(refusal.headers["Retry-After"])
    return 0


@pytest.mark.parametrize("seed", range(20))
def test_spend_allows_exactly_the_burst_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(seed)
    Clock(monkeypatch, int(draw.integers(10**16)))
    burst = int(draw.integers(1, 4001))
    limiter = RateLimiter(per_s=draw.uniform(0.1, 3000), burst=burst)
    assert not any(_retry_after_s(limiter, "a") for _ in range(burst))
    assert _retry_after_s(limiter, "a") >= 1


@pytest.mark.parametrize("seed", range(20))
def test_spend_agrees_with_a_bucket_that_counts_tokens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(seed)
    per_s, burst = float(draw.choice([0.25, 1, 8, 1000])), int(draw.integers(1, 7))
    quarter_ns = round(SECOND / per_s / 4)
    clock, limiter = Clock(monkeypatch, int(draw.integers(10**16))), RateLimiter(per_s=per_s, burst=burst)
    quarters = 4 * burst  # of a request
    for _ in range(300):
        waited = int(draw.integers(9))
        clock.now_ns += waited * quarter_ns
        quarters = min(4 * burst, quarters + waited)
        expected = 0 if quarters >= 4 else -(-(4 - quarters) * quarter_ns // SECOND)
        assert _retry_after_s(limiter, "a") == expected
        quarters -= 4 if quarters >= 4 else 0


@pytest.mark.parametrize("seed", range(5))
def test_after_the_named_wait_the_next_request_passes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(seed)
    clock = Clock(monkeypatch, int(draw.integers(10**16)))
    limiter = RateLimiter(per_s=draw.uniform(0.1, 50), burst=int(draw.integers(1, 6)))
    refused = 0
    for _ in range(200):
        wait_s = _retry_after_s(limiter, "a")
        if wait_s:
            refused += 1
            clock.now_ns += wait_s * SECOND
            assert _retry_after_s(limiter, "a") == 0
    assert refused
