"""A projector for tests that always leads."""

from ablate.service.background.projector import ProjectionSink, Projector
from ablate.service.store.session import Store


def projector(store: Store, sink: ProjectionSink) -> Projector:
    """Return a projector of this process."""
    return Projector(store, sink, check=lambda: None, anyone=store)
