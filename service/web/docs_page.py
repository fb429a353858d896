"""The REST interface as people read it: one page made from the OpenAPI document, without a script or a package."""

from collections.abc import Callable
from functools import cache

from fastapi import APIRouter, FastAPI, Request, Response

from service.web.html import PageRoute, render
from service.web.interface import describe
from service.web.sending import sent

router = APIRouter(include_in_schema=False, route_class=PageRoute)


def writer(app: FastAPI) -> Callable[[], str]:
    """Return what writes the page of `app`, once: its document does not change while it runs."""
    return cache(lambda: render("docs.html", interface=describe(app.openapi()), visitor=None))


@router.get("/docs")
def show_docs(request: Request) -> Response:
    """Show the interface to anybody; what it describes needs a token."""
    return sent(request, request.app.state.write_docs())
