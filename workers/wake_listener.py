"""The only Celery task: a wake-up from the broker, which carries no work; the claim over HTTP does."""

import logging
import threading

from celery import Celery
from celery.worker import state
from kombu.exceptions import OperationalError

from experiments.runtime.wake import WAKE_TASK, celery_app, wake_subscription
from workers.wake_event import WakeEvent

_log = logging.getLogger(__name__)

_QUIET = {"without_gossip": True, "without_mingle": True, "without_heartbeat": True}
"""Workers need to know nothing about each other."""

_RESTART_S = 2.0
_JOIN_S = 2.0


class WakeListener:
    """A Celery worker (solo pool) in a thread of its own; without a broker the supervisor's polling goes on."""

    def __init__(self, broker_url: str, node_class: str, wake_event: WakeEvent) -> None:
        self._app = wake_app(broker_url, node_class, wake_event)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wake", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> None:
        """End the Celery worker; one that hangs on a dead broker ends with the process."""
        self._over.set()
        state.should_stop = 0
        self._thread.join(_JOIN_S)
        state.should_stop = None

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._app.WorkController(pool="solo", concurrency=1, **_QUIET).start()
            except (OperationalError, OSError) as error:
                _log.warning("broker: %s; polling goes on", error)
            except SystemExit:
                return
            self._over.wait(_RESTART_S)


def wake_app(broker_url: str, node_class: str, wake_event: WakeEvent) -> Celery:
    """Build the Celery application that serves wake-ups of a node class."""
    app = celery_app(broker_url, name="ablate.worker")
    app.conf.task_queues = (wake_subscription(node_class),)

    @app.task(name=WAKE_TASK)  # type: ignore[untyped-decorator]
    def wake(node_class: str) -> None:
        wake_event.set()

    return app
