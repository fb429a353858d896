"""A projector for tests that run in this process, which no alarm may end."""

from service.background.projector import ProjectionSink, Projector
from service.store.session import Store


class NoAlarm:
    """Ends nobody."""

    def set(self, until_s: float) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Do nothing."""


def projector(store: Store, sink: ProjectionSink, *, lease_s: float = 30.0) -> Projector:
    """Return a projector of this process."""
    return Projector(store, sink, lease_s=lease_s, alarm=NoAlarm())
