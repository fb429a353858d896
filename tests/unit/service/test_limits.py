import pytest

from service.errors import TooManyRequests
from service.limits import RateLimiter


def test_spend_allows_a_burst_then_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("service.limits.time.monotonic", lambda: now)
    limiter = RateLimiter(per_s=0.5, burst=2)
    limiter.spend("a")
    limiter.spend("a")
    with pytest.raises(TooManyRequests) as caught:
        limiter.spend("a")
    assert caught.value.headers == {"Retry-After": "2"}
    limiter.spend("b")
    now = 102.0
    limiter.spend("a")
    with pytest.raises(TooManyRequests):
        limiter.spend("a")


def test_spend_never_saves_more_than_the_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("service.limits.time.monotonic", lambda: now)
    limiter = RateLimiter(per_s=10, burst=1)
    limiter.spend("a")
    now = 1000.0
    limiter.spend("a")
    with pytest.raises(TooManyRequests):
        limiter.spend("a")
