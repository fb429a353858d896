"""Webhooks: one signed POST to another service when an ablation ends, by https://www.standardwebhooks.com.

The signature proves the sender, the time excludes old messages, and the id is the same in every repeat.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.system.http_clients import connection_options, reason, redirect_hint
from ablate.experiments.system.setting_values import host_of
from ablate.service.errors import ConfigurationError, WebhookRefused
from ablate.service.settings import ServiceSettings

PREFIX = "whsec_"
MIN_KEY_BYTES = 24
_TIMEOUT_S = 10.0
"""Time for the whole exchange, however slowly the receiver answers."""
_MAX_ANSWER_BYTES = 4096
"""The rest of an answer is not read."""
_SHOWN = 200


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """A receiver's address and the key to sign with."""

    url: str
    key: bytes
    links_base: str = ""
    """The service's public address; without one, links in messages are paths."""

    def send(self, message_id: str, content: dict[str, Any]) -> None:
        """Send `content` once. Raises WebhookRefused unless the receiver answers 2xx."""
        body = json.dumps(content, ensure_ascii=False).encode()
        _send(self.url, body, signed_headers(self.key, message_id, int(time.time()), body))


def post_json(url: str, content: dict[str, Any]) -> None:
    """Send `content` once, without a signature. Raises WebhookRefused unless the receiver answers 2xx."""
    _send(url, json.dumps(content, ensure_ascii=False).encode(), {})


def _send(url: str, body: bytes, headers: dict[str, str]) -> None:
    address = host_of(url)  # the path of a webhook is often a secret
    try:
        refusal = asyncio.run(_post(url, body, {"Content-Type": "application/json", **headers}))
    except TimeoutError as error:
        raise WebhookRefused(f"{address}: no whole answer within {_TIMEOUT_S:g} s") from error
    except httpx.HTTPError as error:
        raise WebhookRefused(f"{address}: {reason(error, url)}") from error
    if refusal is not None:
        raise WebhookRefused(f"{address} {refusal}")


async def _post(url: str, body: bytes, headers: dict[str, str]) -> str | None:
    """Send a message; return how the receiver refused it, None if it answered 2xx. Raises TimeoutError, HTTPError."""
    async with (
        asyncio.timeout(_TIMEOUT_S),
        httpx.AsyncClient(timeout=_TIMEOUT_S, **connection_options(url)) as client,
        client.stream("POST", url, content=body, headers=headers) as answer,
    ):
        if answer.is_success:
            return None
        start = b""
        async for part in answer.aiter_raw():
            start += part
            if len(start) >= _MAX_ANSWER_BYTES:
                break
        hint = redirect_hint(answer) or f": {start.decode(errors='replace')[:_SHOWN]}"
        return f"answered {answer.status_code}{hint}"


def webhook_of(settings: ServiceSettings) -> Webhook | None:
    """Return the webhook of the settings, None without one. Raises ConfigurationError."""
    secret = settings.webhook_secret
    if not settings.webhook_url:
        return None
    if secret is None:
        raise ConfigurationError("ABLATE_WEBHOOK_URL is set and ABLATE_WEBHOOK_SECRET is not; webhooks are signed")
    return Webhook(url=settings.webhook_url, key=key_of(secret.get_secret_value()), links_base=settings.public_url)


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


def content_of(ablation_id: str, name: str, state: str, verdict: Verdict | None, *, base: str = "") -> dict[str, Any]:
    """Return the message: how the ablation ended, and the word and decision of every variant.

    Its links begin with `base`, the service's public address; without one they are paths.
    """
    variants = () if verdict is None else verdict.variants
    return {
        "type": "ablation.over",
        "data": {
            "ablation": ablation_id,
            "name": name,
            "state": state,
            "verdict_digest": None if verdict is None else verdict.digest,
            "variants": {one.arm: {"word": one.verdict, "decision": one.decision} for one in variants},
            "verdict": f"{base}/v1/ablations/{ablation_id}/verdict",
            "report": f"{base}/v1/ablations/{ablation_id}/report",
        },
    }
