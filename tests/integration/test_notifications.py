"""Notices to owners: each is sent once to each place that its owner named, and to no host that is not allowed."""

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import select, update

from ablate.experiments.ids import NIGHTLY_LABEL
from ablate.service.background.notifications import Notifier, mailer_of
from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.background.webhooks import key_of, signed_headers
from ablate.service.errors import ConfigurationError
from ablate.service.lifecycle import OutboxKind
from ablate.service.settings import ServiceSettings
from ablate.service.store import outbox
from ablate.service.store.ablations import results
from ablate.service.store.access import notifications
from ablate.service.store.tables import db_now, tokens
from ablate.service.store.tables import outbox as outbox_rows
from tests.api_stack import Api, api_fixture, nobody_url
from tests.factories import spec_values
from tests.receiver import Receiver, receiving

HOSTS = "hooks.example.org, 127.0.0.1"
BASE = "https://ablate.example.org"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
SPEC: dict[str, Any] = {"ablation": "a-b", "question": "Is <x> & y?"}

api = api_fixture(notify_hosts=HOSTS, smtp_url=SecretStr("smtp://127.0.0.1:1"))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


class Mail(socketserver.StreamRequestHandler):
    """A mail server that accepts everything, or refuses recipients."""

    def handle(self) -> None:
        server: Any = self.server
        self._say("220 here")
        while line := self.rfile.readline().decode().strip():
            word = line.upper()
            if word == "DATA":
                self._say("354 go on")
                server.mails.append(b"".join(iter(self.rfile.readline, b".\r\n")).decode())
                self._say("250 taken")
            elif word == "QUIT":
                self._say("221 bye")
                return
            else:
                refuses = word.startswith("RCPT") and server.refuses
                self._say("550 no such person" if refuses else "250 ok")

    def _say(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())


@contextmanager
def mail_server(*, refuses: bool = False) -> Iterator[Any]:
    server: Any = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Mail)
    server.mails, server.refuses, server.daemon_threads = [], refuses, True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def notifier(api: Api, port: int = 1) -> Notifier:
    mailer = mailer_of(ServiceSettings(smtp_url=SecretStr(f"smtp://127.0.0.1:{port}"), email_from="a@b.example"))
    return Notifier(store=api.store, hosts=("127.0.0.1",), mailer=mailer, links_base=BASE)


def placed(api: Api, owner: str, kind: str, target: str, secret: str | None = None) -> str:
    """Store a notification past the route, which demands https."""
    with api.store.write() as connection:
        token_id = connection.scalar(select(tokens.c.id).where(tokens.c.name == owner))
        return notifications.add(connection, str(token_id), kind, target, secret)


def ended(api: Api, headers: dict[str, str]) -> str:
    """Return an ablation of a token whose report is written."""
    made = api.client.post("/v1/ablations", headers={**headers, "Idempotency-Key": "once"}, json=spec_values(**SPEC))
    assert made.status_code == 202, made.text
    api.finish(api.register(), **SPEC)
    for kind in (OutboxKind.JUDGE, OutboxKind.REPORT):
        assert OutboxHandlers(api.store).run_due(kind)
    return str(made.json()["id"])


def send_all(api: Api, own: Notifier) -> int:
    handlers, count = OutboxHandlers(api.store, None, own), 0
    while handlers.run_due(OutboxKind.NOTIFY):
        count += 1
    return count


def test_an_owner_is_told_once_in_every_place_and_nobody_else(api: Api, receiver: Receiver) -> None:
    ada = api.token("ada", "submit")
    api.token("bob", "submit")
    placed(api, "ada", "webhook", receiver.url, SECRET)
    placed(api, "ada", "slack", receiver.url)
    placed(api, "bob", "slack", nobody_url())
    with mail_server() as mail:
        placed(api, "ada", "email", "ada@b.example")
        ablation = ended(api, ada)
        own = notifier(api, port=mail.server_address[1])
        assert send_all(api, own) == 3
        with api.store.write() as connection:  # the report is written again, as after an upgrade
            results.store_report(connection, ablation, "<p>again")
            notifications.ask(connection, ablation)
        assert send_all(api, own) == 0
    (headers, signed), (_, plain) = sorted(receiver.got, key=lambda got: "webhook-id" not in got[0])
    message = json.loads(signed)
    assert (message["type"], message["data"]["ablation"]) == ("ablation.over", ablation)
    expected = signed_headers(key_of(SECRET), headers["webhook-id"], int(headers["webhook-timestamp"]), signed)
    assert headers["webhook-signature"] == expected["webhook-signature"]
    text = json.loads(plain)["text"]
    assert text.startswith("*Ablation a-b is completed*\nIs &lt;x&gt; &amp; y?\n")
    assert text.endswith(f"<{BASE}/a/{ablation}|page>")
    assert "psiv-on: " in text
    (letter,) = mail.mails
    assert "Subject: Ablation a-b is completed" in letter
    assert "To: ada@b.example" in letter
    listed = api.client.get("/v1/notifications", headers=ada).json()["items"]
    assert [(one["kind"], one["sent"], one["waiting"]) for one in listed] == [
        ("email", 1, 0),
        ("slack", 1, 0),
        ("webhook", 1, 0),
    ]
    assert receiver.url not in json.dumps(listed)
    assert len(api.get("/v1/notifications").json()["items"]) == 4, "operators see all"


def test_nobody_is_told_of_a_night_which_may_not_be_confirmed(api: Api) -> None:
    ada = api.token("ada", "submit")
    placed(api, "ada", "slack", nobody_url())
    spec = {**SPEC, "labels": {NIGHTLY_LABEL: "a/main"}}
    api.client.post("/v1/ablations", headers={**ada, "Idempotency-Key": "once"}, json=spec_values(**spec))
    api.finish(api.register(), **spec)
    for kind in (OutboxKind.JUDGE, OutboxKind.REPORT):
        assert OutboxHandlers(api.store).run_due(kind)
    assert send_all(api, notifier(api)) == 0
    assert api.client.get("/v1/notifications", headers=ada).json()["items"][0]["waiting"] == 0


def test_what_is_not_taken_is_tried_again_and_a_removed_place_gets_nothing(api: Api, receiver: Receiver) -> None:
    receiver.statuses = [500]
    first = placed(api, "admin", "slack", receiver.url)
    with mail_server(refuses=True) as mail:
        placed(api, "admin", "email", "gone@b.example")
        placed(api, "admin", "slack", "http://elsewhere.example/x")
        made = api.submit()["id"]
        with api.store.write() as connection:
            notifications.ask(connection, made)
        assert send_all(api, notifier(api, port=mail.server_address[1])) == 3
    problems = {one["kind"] + one["target"]: one["problem"] for one in api.get("/v1/notifications").json()["items"]}
    assert "answered 500" in problems["slack127.0.0.1"]
    assert "550" in problems["emailgone@b.example"]
    assert "not in ABLATE_NOTIFY_HOSTS" in problems["slackelsewhere.example"]
    with api.store.write() as connection:
        connection.execute(update(outbox_rows).values(due_at=db_now()))
        assert len(outbox.due(connection, OutboxKind.NOTIFY, limit=9)) == 3
    answer = api.client.post(f"/v1/notifications/{first}:remove", headers=api.admin)
    assert (answer.status_code, first in answer.text) == (200, False)
    send_all(api, notifier(api))
    assert len(receiver.got) == 1, "nothing more after its removal"


REFUSED = [
    ("slack", "http://hooks.example.org/x", "allowed: https://"),
    ("slack", "https://evil.example/x", "host 'evil.example' is not allowed; allowed hosts: hooks.example.org"),
    ("webhook", "https://hooks.example.org:8443/x", "without user name and port"),
    ("webhook", "https://hooks.example.org@169.254.169.254/x", "without user name and port"),
    ("webhook", "https://169.254.169.254/latest", "is not allowed"),
    ("webhook", "https://[::1/x", "this is no address"),
    ("email", "ada", "no e-mail address"),
    ("email", "a@b.example,c@d.example", "no e-mail address"),
]


def test_an_address_that_is_not_allowed_is_refused_at_its_place(api: Api) -> None:
    for kind, target, words in REFUSED:
        answer = api.client.post("/v1/notifications", headers=api.admin, json={"kind": kind, "target": target})
        assert answer.status_code == 422, target
        (problem,) = answer.json()["errors"]
        assert problem["pointer"] == "#/target"
        assert words in problem["detail"], target
    assert api.get("/v1/notifications").json()["items"] == []


def test_a_token_adds_sees_and_removes_its_own_only(api: Api) -> None:
    ada, bob = api.token("ada", "submit"), api.token("bob", "submit")
    body = {"kind": "webhook", "target": "https://hooks.example.org/hidden-path"}
    made = api.client.post("/v1/notifications", headers=ada, json=body)
    assert made.status_code == 201, made.text
    assert key_of(made.json()["secret"])
    assert made.json()["notification"]["target"] == "hooks.example.org"
    own = made.json()["notification"]["id"]
    assert api.client.get("/v1/notifications", headers=bob).json()["items"] == []
    assert api.client.post(f"/v1/notifications/{own}:remove", headers=bob).status_code == 404
    listed = api.client.get("/v1/notifications", headers=ada)
    assert [one["id"] for one in listed.json()["items"]] == [own]
    assert made.json()["secret"] not in listed.text
    assert "hidden-path" not in listed.text
    for _ in range(notifications.MOST - 1):
        assert api.client.post("/v1/notifications", headers=ada, json=body).status_code == 201
    full = api.client.post("/v1/notifications", headers=ada, json=body)
    assert (full.status_code, "remove one" in full.text) == (422, True)
    assert api.client.post(f"/v1/notifications/{own}:remove", headers=ada).status_code == 200


@pytest.mark.parametrize("url", ["http://mail.example", "smtp://", "mail.example"])
def test_an_address_that_is_no_mail_server_stops_the_start(url: str) -> None:
    with pytest.raises(ConfigurationError, match="ABLATE_SMTP_URL is no mail server"):
        mailer_of(ServiceSettings(smtp_url=SecretStr(url)))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("smtps://u:p%40@mail.example", ("mail.example", 465, True, False, "u", "p@")),
        ("smtp://mail.example", ("mail.example", 587, False, True, "", "")),
        ("smtp://127.0.0.1:25", ("127.0.0.1", 25, False, False, "", "")),
    ],
)
def test_mail_is_encrypted_except_on_this_machine(url: str, expected: tuple[Any, ...]) -> None:
    made = mailer_of(ServiceSettings(smtp_url=SecretStr(url)))
    assert made is not None
    assert (made.host, made.port, made.implicit_tls, made.starttls, made.user, made.password) == expected
