import random

import pytest

from ablate.workers.lease import END_S, Lease, StopReason, margin_s


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("lease_s", "expected"), [(2.0, 0.5), (20.0, 5.0), (30.0, 5.0), (3600.0, 5.0)])
def test_margin_is_the_time_of_an_end_and_at_most_a_quarter(lease_s: float, expected: float) -> None:
    assert margin_s(lease_s) == expected


def test_lease_counts_from_before_the_call_and_ends_a_margin_early() -> None:
    clock = Clock()
    lease = Lease(4.0, sent_at=99.0, clock=clock)
    assert lease.left_s() == 2.0
    clock.now = 101.9
    assert lease.reason() is None
    clock.now = 102.0
    assert lease.reason() is StopReason.FENCED


@pytest.mark.parametrize(("lease_s", "sent_at", "left_s"), [(4.0, 102.0, 5.0), (1.0, 99.0, 3.0)])
def test_renew_extends_from_its_own_start_and_never_shortens(lease_s: float, sent_at: float, left_s: float) -> None:
    lease = Lease(4.0, sent_at=100.0, clock=Clock())
    lease.renew(lease_s, sent_at=sent_at)
    assert lease.left_s() == left_s


def test_revoke_is_stronger_than_cancel() -> None:
    lease = Lease(4.0, sent_at=100.0, clock=Clock())
    lease.cancel()
    assert lease.reason() is StopReason.CANCELLED
    lease.revoke()
    assert lease.reason() is StopReason.FENCED


def test_worker_then_guardian_then_service() -> None:
    """For any renewals: the worker's deadline comes first, then its guardian's, then the service's."""
    draw = random.Random(20261122)  # noqa: S311 - a repeatable draw
    for _ in range(2000):
        deadlines: list[float] = []
        lease_s, sent_at = draw.uniform(0.5, 120), 100.0
        lease = Lease(lease_s, sent_at=sent_at, clock=Clock(), on_deadline=deadlines.append)
        service_until = sent_at + draw.uniform(0, 2) + lease_s  # the service counts from its answer
        for _ in range(draw.randrange(5)):
            sent_at += draw.uniform(0, lease_s)
            lease.renew(lease_s, sent_at=sent_at)
            service_until = sent_at + draw.uniform(0, 2) + lease_s
        assert lease.until < deadlines[-1] < service_until
        slack = min(END_S, lease_s / 4) / 2
        assert deadlines[-1] - lease.until == pytest.approx(slack)
        assert service_until - deadlines[-1] >= slack - 1e-9
