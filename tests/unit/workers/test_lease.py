from workers.lease import Lease, StopReason


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lease_counts_from_before_the_call() -> None:
    clock = Clock()
    lease = Lease(3.0, asked_at=99.0, clock=clock)
    assert lease.left_s() == 2.0
    clock.now = 101.9
    assert lease.reason() is None
    clock.now = 102.0
    assert lease.reason() is StopReason.FENCED


def test_renew_extends_from_its_own_start() -> None:
    clock = Clock()
    lease = Lease(3.0, asked_at=100.0, clock=clock)
    lease.renew(3.0, asked_at=102.0)
    assert lease.left_s() == 5.0


def test_renew_never_shortens() -> None:
    lease = Lease(3.0, asked_at=100.0, clock=Clock())
    lease.renew(1.0, asked_at=99.0)
    assert lease.left_s() == 3.0


def test_revoke_is_stronger_than_cancel() -> None:
    lease = Lease(3.0, asked_at=100.0, clock=Clock())
    lease.cancel()
    assert lease.reason() is StopReason.CANCELLED
    lease.revoke()
    assert lease.reason() is StopReason.FENCED
