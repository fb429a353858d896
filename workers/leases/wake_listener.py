"""Wake-ups from the broker. A wake-up only ends a pause of the worker, which then claims work over HTTP."""

import logging
import threading

from celery import Celery
from celery.worker import state
from kombu.exceptions import OperationalError

from ablate.experiments.system.wake import WAKE_TASK, celery_app, wake_subscription
from ablate.workers.processes.wake_event import WakeEvent

_log = logging.getLogger(__name__)

_QUIET = {"without_gossip": True, "without_mingle": True, "without_heartbeat": True}
"""Workers do not need each other's messages."""

_RETRY_S = 2.0
_CONNECT_S = 2.0
_JOIN_S = 2.0


class WakeListener:
    """A Celery worker (solo pool) in a thread of its own. Without a broker the supervisor still polls."""

    def __init__(self, broker_url: str, node_class: str, wake_event: WakeEvent, *, poll_s: float) -> None:
        self._app = wake_app(broker_url, node_class, wake_event)
        self._poll_s = poll_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wake", daemon=True)

    def start(self) -> None:
        """Start to listen."""
        # it repeats at every try a warning that _run logs once
        logging.getLogger("celery.worker.consumer.consumer").setLevel(logging.CRITICAL + 1)
        self._thread.start()

    def stop(self) -> None:
        """End the Celery worker. If it hangs on a dead broker, it ends with the process."""
        self._over.set()
        state.should_stop = 0
        self._thread.join(_JOIN_S)
        state.should_stop = None

    def _run(self) -> None:
        was_missing = False
        while not self._over.is_set():
            problem = self._problem()
            if problem is None:
                if was_missing:
                    _log.info("the broker answers again and wakes this worker")
                self._listen()
            elif not was_missing:
                _log.warning("no broker (%s): this worker asks for work every %g s", problem, self._poll_s)
            was_missing = problem is not None
            self._over.wait(_RETRY_S)

    def _problem(self) -> str | None:
        """Return why the broker is unreachable, None when it answers."""
        try:
            with self._app.connection_for_read() as connection:
                connection.ensure_connection(max_retries=1, timeout=_CONNECT_S)
        except (OperationalError, OSError) as error:
            return str(error)
        return None

    def _listen(self) -> None:
        """Wait for wake-ups until the connection is lost, or this worker ends."""
        try:
            self._app.WorkController(pool="solo", concurrency=1, **_QUIET).start()
        except (OperationalError, OSError, SystemExit) as error:
            _log.debug("stopped listening: %r", error)


def wake_app(broker_url: str, node_class: str, wake_event: WakeEvent) -> Celery:
    """Build the Celery application for the wake-ups of a node class; it ends when it loses the broker."""
    app = celery_app(broker_url, name="ablate.worker")
    app.conf.task_queues = (wake_subscription(node_class),)
    app.conf.broker_connection_retry = False
    app.conf.broker_connection_retry_on_startup = False

    @app.task(name=WAKE_TASK)  # type: ignore[untyped-decorator]
    def wake(node_class: str) -> None:
        wake_event.set()

    return app
