"""Wake-ups of workers: one fanout exchange for each node class, which every connected worker of the class receives.

A wake-up contains no work, and the broker does not keep it for disconnected workers, which poll. So no broker setting
here can lose or repeat a trial.
"""

from typing import Any

from celery import Celery
from kombu import Exchange
from kombu.common import Broadcast

WAKE_TASK = "ablate.wake"
"""Name of the Celery task that workers serve."""

LISTEN_S = 30.0
"""Seconds that a worker waits for an answer before it reconnects."""

_TRANSPORT_OPTIONS = {
    "visibility_timeout": 60,
    "unacked_restore_interval": 5,
    "unacked_restore_throttle": 1,
    "socket_connect_timeout": 2,
    "socket_keepalive": True,
    "health_check_interval": 10,
}


def celery_app(broker_url: str, *, name: str, answer_s: float = LISTEN_S) -> Celery:
    """Return a Celery application for wake-ups only: no results, no prefetch, fast failure without a broker.

    A broker that accepts a connection but does not answer for `answer_s` seconds counts as unreachable.
    """
    app = Celery(name, broker=broker_url, set_as_current=False)
    app.conf.update(
        broker_transport_options={**_TRANSPORT_OPTIONS, "socket_timeout": answer_s},
        broker_connection_timeout=2,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        result_backend=None,
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        worker_send_task_events=False,
        task_send_sent_event=False,
        task_create_missing_queues=False,
    )
    return app


def wake_queue(node_class: str) -> str:
    """Return the name of a node class's exchange and of its workers' queues."""
    return f"wake.{node_class}"


def wake_exchange(node_class: str) -> Exchange:
    """Return the exchange of a node class, which sender and receivers declare."""
    return Exchange(wake_queue(node_class), type="fanout", durable=False)


def wake_subscription(node_class: str) -> Broadcast:
    """Return a worker's own queue, bound to the node class's exchange and deleted with the worker."""
    name = wake_queue(node_class)
    return Broadcast(name=name, unique=True, auto_delete=True, exchange=wake_exchange(node_class), routing_key=name)


def publish_wake(app: Any, node_class: str) -> None:
    """Wake every worker of `node_class`, because there may be work.

    Raises kombu.exceptions.OperationalError if the broker cannot be reached.
    """
    exchange = wake_exchange(node_class)
    # Celery replaces an empty routing key by its own, and the Redis transport makes it part of the channel's name.
    app.send_task(
        WAKE_TASK,
        kwargs={"node_class": node_class},
        exchange=exchange,
        declare=[exchange],  # an undeclared exchange would count as a direct one
        exchange_type="fanout",
        routing_key=wake_queue(node_class),
        ignore_result=True,
        retry=True,
        retry_policy={"max_retries": 1, "interval_start": 0, "interval_max": 0.1},
    )
