"""Notices to owners: a signed webhook, a text for a chat service, or an e-mail.

Each goes only to a host that the operator allows (ABLATE_NOTIFY_HOSTS), by the rules of webhooks: no redirect is
followed, an answer is read up to a limit, and the whole exchange has ten seconds. The library apprise cannot keep these
rules: its addresses choose host and redirects, and its time limits count from byte to byte. So only commands use it.
"""

import smtplib
import ssl
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import formatdate
from typing import Any
from urllib.parse import unquote, urlsplit

from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.reporting import wording
from ablate.service.background.webhooks import Webhook, content_of, key_of, post_json
from ablate.service.errors import ConfigurationError, WebhookRefused
from ablate.service.settings import ServiceSettings
from ablate.service.store.ablations.ablations import get_whole
from ablate.service.store.access import notifications
from ablate.service.store.session import Store

_SMTP_S = 10.0
_MOST_LINES = 30
_MOST_SUBJECT = 150


@dataclass(frozen=True, kw_only=True)
class Mailer:
    """A mail server and the sender of the messages."""

    host: str
    port: int
    sender: str
    implicit_tls: bool
    starttls: bool
    user: str = ""
    password: str = ""

    def send(self, to: str, subject: str, text: str, message_id: str) -> None:
        """Send one message. Raises WebhookRefused."""
        message = EmailMessage()
        message["From"], message["To"], message["Subject"] = self.sender, to, subject
        message["Date"], message["Message-ID"] = formatdate(), f"<{message_id}@ablate>"
        message.set_content(text)
        try:
            with self._connected() as server:
                if self.starttls:
                    server.starttls(context=ssl.create_default_context())
                if self.user:
                    server.login(self.user, self.password)
                server.send_message(message)
        except (smtplib.SMTPException, OSError) as error:
            raise WebhookRefused(f"{self.host}: {type(error).__name__}: {error}") from error

    def _connected(self) -> smtplib.SMTP:
        if self.implicit_tls:
            return smtplib.SMTP_SSL(self.host, self.port, timeout=_SMTP_S, context=ssl.create_default_context())
        return smtplib.SMTP(self.host, self.port, timeout=_SMTP_S)


def mailer_of(settings: ServiceSettings) -> Mailer | None:
    """Return the mail server of the settings; None without one. Raises ConfigurationError."""
    if settings.smtp_url is None:
        return None
    url = urlsplit(settings.smtp_url.get_secret_value())
    if url.scheme not in ("smtp", "smtps") or not url.hostname:
        raise ConfigurationError("ABLATE_SMTP_URL is no mail server; allowed: smtps://HOST or smtp://HOST, with a user")
    implicit = url.scheme == "smtps"
    return Mailer(
        host=url.hostname,
        port=url.port or (465 if implicit else 587),
        sender=settings.email_from,
        implicit_tls=implicit,
        starttls=not implicit and url.hostname not in ("127.0.0.1", "localhost", "::1"),
        user=unquote(url.username or ""),
        password=unquote(url.password or ""),
    )


@dataclass(frozen=True, kw_only=True)
class Notifier:
    """Sends the notices of the outbox."""

    store: Store
    hosts: Collection[str]
    mailer: Mailer | None
    links_base: str
    """The service's public address; without one, links in messages are paths."""

    def send(self, notice_id: str) -> None:
        """Send a notice once; one whose notification was removed is forgotten. Raises WebhookRefused."""
        with self.store.read() as connection:
            notice = notifications.notice_of(connection, notice_id)
            row = None if notice is None else get_whole(connection, notice.ablation_id)
        if notice is None or row is None:
            return
        verdict = None if row.verdict is None else Verdict.model_validate_json(row.verdict)
        if notice.kind == "email":
            self._mail(notice, row, verdict, notice_id)
        else:
            self._post(notice, row, verdict, notice_id)
        with self.store.write() as connection:
            notifications.sent(connection, notice_id)

    def _mail(self, notice: Any, row: Any, verdict: Verdict | None, notice_id: str) -> None:
        if self.mailer is None:
            raise WebhookRefused("ABLATE_SMTP_URL is not set, so this service sends no e-mail")
        lines = list(lines_of(row, verdict))
        text = "\n".join([*lines, "", f"{self.links_base}/a/{row.id}", ""])
        self.mailer.send(notice.target, wording.shorten(lines[0], _MOST_SUBJECT), text, notice_id)

    def _post(self, notice: Any, row: Any, verdict: Verdict | None, notice_id: str) -> None:
        host = urlsplit(notice.target).hostname
        if host not in self.hosts:
            raise WebhookRefused(f"{host} is not in ABLATE_NOTIFY_HOSTS")
        if notice.kind == "webhook":
            content = content_of(row.id, row.name, row.state, verdict, base=self.links_base)
            Webhook(url=notice.target, key=key_of(notice.secret)).send(f"msg_{notice_id}", content)
        else:
            post_json(notice.target, slack_message(row, verdict, self.links_base))


def lines_of(row: Any, verdict: Verdict | None) -> Iterator[str]:
    """Yield the message as text: what ended, the question, and a line for each variant."""
    yield f"Ablation {row.name} is {row.state}"
    yield row.question
    variants = () if verdict is None else verdict.variants
    for one in variants[:_MOST_LINES]:
        yield f"{one.arm}: {one.verdict}, {one.decision}. {wording.with_minus(one.reason)}"
    if len(variants) > _MOST_LINES:
        yield f"and {len(variants) - _MOST_LINES} more variants"


def slack_message(row: Any, verdict: Verdict | None, base: str) -> dict[str, str]:
    """Return the message as chat services take it: one text, with their escapes, and a link to the page."""
    first, *others = (_escaped(line) for line in lines_of(row, verdict))
    return {"text": "\n".join([f"*{first}*", *others, f"<{base}/a/{row.id}|page>" if base else f"/a/{row.id}"])}


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
