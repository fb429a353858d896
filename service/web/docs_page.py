"""The REST interface as people read it and try it out: Swagger UI from a package, so that it needs no internet."""

from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request, Response

from service.errors import NotFound
from service.web.html import PageRoute, page
from service.web.sending import PICTURE_POLICY, compressed

router = APIRouter(include_in_schema=False, route_class=PageRoute)

ASSETS = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript"}
_A_DAY = {"Cache-Control": "public, max-age=86400", "Vary": "Accept-Encoding"}


@cache
def _asset(name: str) -> bytes:
    return (files("fastapi_offline") / "static" / name).read_bytes()


@router.get("/docs")
async def show_docs(request: Request) -> Response:
    """Show the interface; whoever tries it out gives a token there, which stays in the browser."""
    return page(request, "docs.html", policy=PICTURE_POLICY)


@router.get("/docs/{name}")
async def get_docs_asset(request: Request, name: str) -> Response:
    """Return a file of Swagger UI."""
    if name not in ASSETS:
        raise NotFound(f"there is no file {name!r}")
    return compressed(request, _asset(name), ASSETS[name], dict(_A_DAY))
