"""Webhooks: one signed POST to another service when an ablation ends, by https://www.standardwebhooks.com.

The signature proves the sender, the time excludes old messages, and the id is the same in every repeat.
"""

import base64
import binascii
import hashlib
import hmac
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from experiments.analysis.verdicts import Verdict
from service.errors import ConfigurationError, WebhookRefused
from service.settings import ServiceSettings

PREFIX = "whsec_"
MIN_KEY_BYTES = 24
_TIMEOUT_S = 10.0
_SHOWN = 200


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """A receiver's address and the key to sign with."""

    url: str
    key: bytes

    def send(self, message_id: str, content: dict[str, Any]) -> None:
        """Send `content` once. Raises WebhookRefused unless the receiver answers 2xx."""
        body = json.dumps(content, ensure_ascii=False).encode()
        headers = {"Content-Type": "application/json", **signed_headers(self.key, message_id, int(time.time()), body)}
        try:
            answer = httpx.post(self.url, content=body, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        except httpx.HTTPError as error:
            raise WebhookRefused(f"{self.url}: {type(error).__name__}: {error}") from error
        if not answer.is_success:
            raise WebhookRefused(f"{self.url} answered {answer.status_code}: {answer.text[:_SHOWN]}")


def webhook_of(settings: ServiceSettings) -> Webhook | None:
    """Return the webhook of the settings, None without one. Raises ConfigurationError."""
    secret = settings.webhook_secret
    if not settings.webhook_url:
        return None
    if not settings.webhook_url.startswith(("https://", "http://")):
        raise ConfigurationError(f"ABLATE_WEBHOOK_URL is {settings.webhook_url!r}; allowed: https://... or http://...")
    if secret is None:
        raise ConfigurationError("ABLATE_WEBHOOK_URL is set and ABLATE_WEBHOOK_SECRET is not; webhooks are signed")
    return Webhook(url=settings.webhook_url, key=key_of(secret.get_secret_value()))


def key_of(secret: str) -> bytes:
    """Return the key in a secret. Raises ConfigurationError unless it is whsec_ and base64 of enough bytes."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not secret.startswith(PREFIX) or len(key) < MIN_KEY_BYTES:
        raise ConfigurationError(
            f"ABLATE_WEBHOOK_SECRET must be {PREFIX} and base64 of at least {MIN_KEY_BYTES} bytes, "
            f'for example "{PREFIX}$(openssl rand -base64 32)"'
        )
    return key


def signed_headers(key: bytes, message_id: str, at: int, body: bytes) -> dict[str, str]:
    """Return the headers that sign `body`; `at` is the time in seconds since 1970."""
    mac = hmac.new(key, f"{message_id}.{at}.".encode() + body, hashlib.sha256).digest()
    signature = f"v1,{base64.b64encode(mac).decode()}"
    return {"webhook-id": message_id, "webhook-timestamp": str(at), "webhook-signature": signature}


def content_of(ablation_id: str, name: str, state: str, verdict: Verdict | None) -> dict[str, Any]:
    """Return the message: how the ablation ended, and the word and decision of every variant."""
    variants = () if verdict is None else verdict.variants
    return {
        "type": "ablation.over",
        "data": {
            "ablation": ablation_id,
            "name": name,
            "state": state,
            "verdict_digest": None if verdict is None else verdict.digest,
            "variants": {one.arm: {"word": one.verdict, "decision": one.decision} for one in variants},
            "verdict": f"/v1/ablations/{ablation_id}/verdict",
            "report": f"/v1/ablations/{ablation_id}/report",
        },
    }
