"""How pages are sent: compressed, kept by nobody, and with a policy that lets nothing foreign in."""

import gzip
from http import HTTPStatus

from fastapi import Request, Response

_LOADS = "default-src 'none'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
_LEADS = "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
POLICY = f"{_LOADS}style-src 'self'; {_LEADS}"
"""Content-Security-Policy of a page: nothing inline runs or styles, nothing comes from elsewhere."""
PICTURE_POLICY = f"{_LOADS}style-src 'self' 'unsafe-inline'; {_LEADS}"
"""The same for pages with pictures, which carry their colours as style attributes."""
MIN_COMPRESSED = 1000
"""Bytes from which compressing is worth it."""


def sent(request: Request, text: str, *, status: int = HTTPStatus.OK, policy: str = POLICY) -> Response:
    """Send HTML, compressed for who can read that."""
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
        "Vary": "Accept-Encoding, Cookie",
    }
    return compressed(request, text.encode(), "text/html", headers, status=status)


def compressed(
    request: Request, body: bytes, media_type: str, headers: dict[str, str], *, status: int = HTTPStatus.OK
) -> Response:
    """Send a body, compressed where that is worth it and the client can read it."""
    if len(body) >= MIN_COMPRESSED and "gzip" in request.headers.get("accept-encoding", ""):
        body, headers = gzip.compress(body, 6, mtime=0), {**headers, "Content-Encoding": "gzip"}
    return Response(body, status, headers, media_type)
