"""Links that show the report of one ablation to anybody who has them, until they end or are revoked.

The secret is in the link only; its digest is stored. A link also ends when the token that made it is replaced or
revoked.
"""

import secrets
from typing import Any

from sqlalchemy import Connection, Row, Select, insert, select, update

from ablate.experiments.ids import new_id
from ablate.service.errors import NotFound
from ablate.service.principals import Principal
from ablate.service.store.access.tokens import secret_digest
from ablate.service.store.tables import ablations, db_now, share_links, tokens


def add(connection: Connection, ablation_id: str, principal: Principal, *, lasts_s: float) -> tuple[str, str]:
    """Store a link and return its id and its secret, which cannot be read again."""
    link_id, secret = new_id("shr"), secrets.token_urlsafe(32)
    values = {"ablation_id": ablation_id, "token_id": principal.token_id, "created_by": principal.name, "uses": 0}
    times = {"created_at": db_now(), "ends_at": db_now() + lasts_s}
    connection.execute(insert(share_links).values(id=link_id, digest=secret_digest(secret), **values, **times))
    return link_id, secret


def list_links(connection: Connection, ablation_id: str) -> list[Row[Any]]:
    """Return the links of an ablation, newest first, the ended ones too, each with whether it `is_valid`."""
    query = select(share_links, _VALID.label("is_valid")).join(tokens, tokens.c.id == share_links.c.token_id)
    return list(
        connection.execute(query.where(share_links.c.ablation_id == ablation_id).order_by(share_links.c.id.desc()))
    )


_VALID = share_links.c.revoked_at.is_(None) & (share_links.c.ends_at > db_now()) & tokens.c.revoked_at.is_(None)


def revoke(connection: Connection, ablation_id: str, link_id: str) -> None:
    """End a link now; repeating it changes nothing. Raises NotFound."""
    mine = (share_links.c.id == link_id, share_links.c.ablation_id == ablation_id)
    if connection.execute(select(share_links.c.id).where(*mine)).first() is None:
        raise NotFound(f"ablation {ablation_id} has no link {link_id!r}; ablate share {ablation_id} --list shows all")
    connection.execute(update(share_links).where(*mine, share_links.c.revoked_at.is_(None)).values(revoked_at=db_now()))


def find(connection: Connection, secret: str) -> Row[Any] | None:
    """Return the link with this secret and the `report_html` and `state` of its ablation; None if it ended."""
    columns = (share_links.c.id, share_links.c.ablation_id, ablations.c.report_html, ablations.c.state)
    query: Select[Any] = select(*columns).join(tokens, tokens.c.id == share_links.c.token_id)
    query = query.join(ablations, ablations.c.id == share_links.c.ablation_id)
    return connection.execute(query.where(share_links.c.digest == secret_digest(secret), _VALID)).first()


def count_use(connection: Connection, link_id: str) -> None:
    """Count that a link was opened."""
    counted = {"uses": share_links.c.uses + 1, "used_at": db_now()}
    connection.execute(update(share_links).where(share_links.c.id == link_id).values(**counted))
