"""Webhooks: signed as the standard says, sent by the outbox until somebody takes them."""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError
from sqlalchemy import select, update

from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.background.reconciler import HOOK_AGE_S, Reconciler
from ablate.service.background.webhooks import Webhook, key_of, signed_headers, webhook_of
from ablate.service.errors import ConfigurationError, WebhookRefused
from ablate.service.lifecycle import OutboxKind
from ablate.service.settings import ServiceSettings
from ablate.service.store.tables import db_now, outbox
from tests.api_stack import Api, api_fixture, nobody_url
from tests.receiver import Receiver, receiving

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


api = api_fixture()


def handlers(api: Api, url: str | None) -> OutboxHandlers:
    webhook = None if url is None else Webhook(url=url, key=key_of(SECRET))
    return OutboxHandlers(api.store, webhook)


def finished(api: Api) -> str:
    made = api.submit()
    api.finish(api.register())
    return str(made["id"])


def rows(api: Api) -> list[Any]:
    with api.store.read() as connection:
        return list(connection.execute(select(outbox).where(outbox.c.kind == OutboxKind.HOOK)))


def test_signature_is_the_one_of_the_standard() -> None:
    body = b'{"test": 2432232314}'
    headers = signed_headers(key_of(SECRET), "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_end_of_an_ablation_is_told_once_it_is_taken(api: Api, receiver: Receiver) -> None:
    ablation, began = finished(api), time.time()
    receiver.statuses = [500]
    outbox_handlers = handlers(api, receiver.url)
    for kind in (OutboxKind.JUDGE, OutboxKind.REPORT, OutboxKind.HOOK):
        assert outbox_handlers.run_due(kind)
    (row,) = rows(api)
    assert (row.tries, "answered 500" in row.last_error) == (1, True)
    assert outbox_handlers.run_due(OutboxKind.HOOK) is False
    with api.store.write() as connection:
        connection.execute(update(outbox).values(due_at=db_now()))
    assert outbox_handlers.run_due(OutboxKind.HOOK)
    assert rows(api) == []
    (first, body), (second, again) = receiver.got
    assert body == again
    assert first["webhook-id"] == second["webhook-id"] == f"msg_{ablation}"
    message = json.loads(body)
    assert (message["type"], message["data"]["ablation"], message["data"]["state"]) == (
        "ablation.over",
        ablation,
        "completed",
    )
    verdict = api.get(f"/v1/ablations/{ablation}/verdict").json()
    assert message["data"]["verdict_digest"] == verdict["digest"]
    words = {one["arm"]: {"word": one["verdict"], "decision": one["decision"]} for one in verdict["variants"]}
    assert message["data"]["variants"] == words
    signed = f"{second['webhook-id']}.{second['webhook-timestamp']}.".encode() + again
    expected = hmac.new(base64.b64decode(SECRET[6:]), signed, hashlib.sha256).digest()
    assert second["webhook-signature"] == f"v1,{base64.b64encode(expected).decode()}"
    assert int(began) <= int(second["webhook-timestamp"]) <= time.time()


def test_cancelled_ablation_is_told_without_a_verdict(api: Api, receiver: Receiver) -> None:
    made = api.submit()
    api.cancel(made["id"])
    outbox_handlers = handlers(api, receiver.url)
    assert outbox_handlers.run_due(OutboxKind.REPORT)
    assert outbox_handlers.run_due(OutboxKind.HOOK)
    ((_, body),) = receiver.got
    data = json.loads(body)["data"]
    assert (data["state"], data["verdict_digest"], data["variants"]) == ("cancelled", None, {})


def test_nothing_is_asked_for_without_an_address(api: Api) -> None:
    finished(api)
    outbox_handlers = handlers(api, None)
    for kind in (OutboxKind.JUDGE, OutboxKind.REPORT):
        assert outbox_handlers.run_due(kind)
    assert rows(api) == []


def test_webhook_that_nobody_takes_for_a_day_is_given_up(api: Api) -> None:
    finished(api)
    outbox_handlers = handlers(api, nobody_url())
    for kind in (OutboxKind.JUDGE, OutboxKind.REPORT, OutboxKind.HOOK):
        assert outbox_handlers.run_due(kind)
    (row,) = rows(api)
    assert "nothing listens there" in row.last_error
    Reconciler(api.store).tick()
    assert len(rows(api)) == 1
    with api.store.write() as connection:
        connection.execute(update(outbox).values(created_at=db_now() - HOOK_AGE_S - 1))
    Reconciler(api.store).tick()
    assert rows(api) == []


def test_redirect_is_not_followed(receiver: Receiver) -> None:
    receiver.statuses = [302]
    with pytest.raises(WebhookRefused, match="answered 302"):
        Webhook(url=receiver.url, key=key_of(SECRET)).send("msg_1", {})
    assert len(receiver.got) == 1


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_!!!", "whsec_c2hvcnQ=", "secret", SECRET[6:]])
def test_weak_or_wrong_secret_is_refused(secret: str) -> None:
    with pytest.raises(ConfigurationError, match="base64 of at least 24 bytes"):
        webhook_of(ServiceSettings(webhook_url="https://x.example/hook", webhook_secret=SecretStr(secret)))


def test_settings_without_a_secret_or_with_another_scheme_are_refused() -> None:
    assert webhook_of(ServiceSettings()) is None
    with pytest.raises(ConfigurationError, match="webhooks are signed"):
        webhook_of(ServiceSettings(webhook_url="https://x.example/hook"))
    with pytest.raises(ValidationError, match="the scheme 'ftp'; allowed: https"):
        ServiceSettings(webhook_url="ftp://x.example")
    webhook = webhook_of(ServiceSettings(webhook_url="https://x.example/hook", webhook_secret=SecretStr(SECRET)))
    assert webhook is not None
    assert webhook.url == "https://x.example/hook"
