from ablate.experiments.system.wake import celery_app, wake_exchange, wake_queue, wake_subscription


def test_subscriptions_share_the_exchange_and_nothing_else() -> None:
    one, two = wake_subscription("cpu"), wake_subscription("cpu")
    assert one.exchange.name == two.exchange.name == wake_exchange("cpu").name == wake_queue("cpu")
    assert one.exchange.type == "fanout"
    assert one.name != two.name
    assert one.auto_delete
    assert wake_subscription("h200").exchange.name != one.exchange.name


def test_celery_app_keeps_no_results_and_creates_no_queues() -> None:
    app = celery_app("memory://", name="test")
    assert app.conf.result_backend is None
    assert app.conf.task_ignore_result
    assert not app.conf.task_create_missing_queues
