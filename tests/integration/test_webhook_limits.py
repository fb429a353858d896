"""A receiver of webhooks that drips, or answers without an end, delays nobody for long and takes no memory."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from ablate.service.background import webhooks
from ablate.service.background.webhooks import Webhook, key_of
from ablate.service.errors import WebhookRefused
from tests.waiting import LIMIT_S

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@contextmanager
def raw_receiver(status: bytes, part: bytes, *, pause_s: float) -> Iterator[str]:
    """Run a receiver that sends `status`, then `part` without an end."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.recv(65536)
                connection.sendall(status)
                while True:
                    connection.sendall(part)
                    time.sleep(pause_s)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"
        thread.join(LIMIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("status", [b"", b"HTTP/1.1 500 No\r\n\r\n"], ids=["header", "body"])
def test_receiver_that_drips_for_ever_is_given_up(status: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "_TIMEOUT_S", 1.0)
    with (
        raw_receiver(status, b"x", pause_s=0.1) as url,
        pytest.raises(WebhookRefused, match="no whole answer within 1 s"),
    ):
        Webhook(url=url, key=key_of(SECRET)).send("msg_1", {})


def test_endless_answer_is_not_read_to_its_end() -> None:
    with (
        raw_receiver(b"HTTP/1.1 500 No\r\n\r\n", b"x" * 65536, pause_s=0.0) as url,
        pytest.raises(WebhookRefused, match=r"answered 500: x{200}$"),
    ):
        Webhook(url=url, key=key_of(SECRET)).send("msg_1", {})
