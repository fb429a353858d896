"""Routes about notifications: where an owner is told about the end of its ablations."""

import re
import secrets
from base64 import b64encode
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Path
from sqlalchemy import Row

from ablate.experiments.errors import SpecProblem
from ablate.experiments.ids import id_pattern
from ablate.service.errors import Invalid
from ablate.service.http.deps import Reader, ServicesDep, Submitter, json_only
from ablate.service.http.responses import secured
from ablate.service.principals import Principal, Scope
from ablate.service.schemas.notifications import (
    NotificationList,
    NotificationMade,
    NotificationPublic,
    NotificationRequest,
)
from ablate.service.settings import ServiceSettings
from ablate.service.store.access import notifications
from ablate.service.store.tables import rfc3339

router = APIRouter(prefix="/v1", tags=["tokens"])

_EMAIL = re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]+([.][A-Za-z0-9-]+)+")
NotificationId = Annotated[str, Path(pattern=id_pattern("ntf"), examples=["ntf_01KAHZ3V5T8QW2R4Y6M9N0P1S8"])]


@router.post(
    "/notifications",
    operation_id="addNotification",
    summary="Be told about the end of your ablations",
    status_code=HTTPStatus.CREATED,
    dependencies=[Depends(json_only)],
    responses=secured(409, 413, 415, 422),
)
def add_notification(wanted: NotificationRequest, services: ServicesDep, principal: Submitter) -> NotificationMade:
    """Send a message to this address at the end of each later ablation of this token.

    Addresses need https and a host that the operator allows. Each message is tried for a day.
    """
    _check(wanted, services.settings)
    secret = f"whsec_{b64encode(secrets.token_bytes(32)).decode()}" if wanted.kind == "webhook" else None
    with services.store.write() as connection:
        made = notifications.add(connection, principal.token_id, wanted.kind, wanted.target, secret)
        rows = notifications.list_notifications(connection, principal.token_id)
    return NotificationMade(notification=_public(next(row for row in rows if row.id == made)), secret=secret)


@router.get("/notifications", operation_id="listNotifications", summary="List notifications", responses=secured())
def list_notifications(services: ServicesDep, principal: Reader) -> NotificationList:
    """Return this token's notifications with what was sent; operators see those of all tokens."""
    with services.store.read() as connection:
        rows = notifications.list_notifications(connection, _whose(principal))
    return NotificationList(items=[_public(row) for row in rows])


@router.post(
    "/notifications/{notification_id}:remove",
    operation_id="removeNotification",
    summary="Remove a notification",
    responses=secured(404, 409, 422),
)
def remove_notification(
    notification_id: NotificationId, services: ServicesDep, principal: Submitter
) -> NotificationList:
    """Send no more messages there. Operators remove any, others their own."""
    with services.store.write() as connection:
        notifications.remove(connection, notification_id, _whose(principal))
        rows = notifications.list_notifications(connection, _whose(principal))
    return NotificationList(items=[_public(row) for row in rows])


def _whose(principal: Principal) -> str | None:
    return None if principal.scope.includes(Scope.OPERATE) else principal.token_id


def _check(wanted: NotificationRequest, settings: ServiceSettings) -> None:
    """Raise Invalid for a target that the service may not, or cannot, send to."""
    find = _email_problem if wanted.kind == "email" else _url_problem
    problem = find(wanted.target, settings)
    if problem is not None:
        raise Invalid(problems=[SpecProblem(pointer="#/target", detail=problem)])


def _email_problem(target: str, settings: ServiceSettings) -> str | None:
    if settings.smtp_url is None:
        return "this service sends no e-mail: its operator has not set ABLATE_SMTP_URL"
    return None if _EMAIL.fullmatch(target) else f"{target!r} is no e-mail address; allowed: name@example.org"


def _url_problem(target: str, settings: ServiceSettings) -> str | None:
    allowed = ", ".join(settings.allowed_hosts) or "none; the operator sets ABLATE_NOTIFY_HOSTS"
    try:
        url = urlsplit(target)
        host, port = url.hostname, url.port
    except ValueError:
        return "this is no address; allowed: https://HOST/PATH"
    if url.scheme != "https" or url.username is not None or port not in (None, 443):
        return "allowed: https://HOST/PATH, without user name and port"
    return None if host in settings.allowed_hosts else f"host {host!r} is not allowed; allowed hosts: {allowed}"


def _public(row: Row[Any]) -> NotificationPublic:
    values = {**row._asdict(), "created_at": rfc3339(row.created_at)}
    if row.kind != "email":
        values["target"] = urlsplit(row.target).hostname
    return NotificationPublic.model_validate(values)
