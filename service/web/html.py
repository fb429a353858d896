"""How pages are made from templates and sent, with their style sheet and scripts, and the pages of errors."""

import gzip
import hashlib
from collections.abc import Callable, Coroutine
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from jinja2 import Environment
from starlette.exceptions import HTTPException

from ablate.experiments.reporting import wording
from ablate.experiments.reporting.pages.report import TEMPLATES, make_environment
from ablate.experiments.reporting.pictures.theme import theme_css
from ablate.experiments.reporting.wording import duration
from ablate.service.errors import NotFound
from ablate.service.http import problems
from ablate.service.http.links import below
from ablate.service.schemas.problems import Problem

_LOADS = "default-src 'none'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
_LEADS = "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
POLICY = f"{_LOADS}style-src 'self'; {_LEADS}"
"""Content-Security-Policy of a page: no inline scripts or styles, nothing from other sites."""
PICTURE_POLICY = f"{_LOADS}style-src 'self' 'unsafe-inline'; {_LEADS}"
"""The same, but pictures may have style attributes, which carry their colours."""
MIN_COMPRESSED = 1000
"""Shorter bodies are sent as they are, in bytes."""


def sent(request: Request, text: str, *, status: int = HTTPStatus.OK, policy: str = POLICY) -> Response:
    """Return a response with HTML, compressed if the client accepts that."""
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
    """Return a response with `body`, compressed if it is long and the client accepts that."""
    if len(body) >= MIN_COMPRESSED and "gzip" in request.headers.get("accept-encoding", ""):
        body, headers = gzip.compress(body, 6, mtime=0), {**headers, "Content-Encoding": "gzip"}
    return Response(body, status, headers, media_type)


router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parent / "static"
_FOREVER = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}


class StaticFile(NamedTuple):
    """The content of one static file."""

    body: bytes
    media_type: str


@cache
def files() -> dict[str, StaticFile]:
    """Return the files by name; the style sheet is that of the report with additions for pages."""
    style = "\n".join([theme_css(), _text(TEMPLATES / "report.css"), _text(FOLDER / "pages.css")])
    scripts = {path.name: StaticFile(path.read_bytes(), "text/javascript") for path in FOLDER.glob("*.js")}
    return {"pages.css": StaticFile(style.encode(), "text/css"), **scripts}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def address(name: str) -> str:
    """Return a file's address, which changes with its content, so browsers may cache it for ever."""
    return f"/static/{name}?{hashlib.sha256(files()[name].body).hexdigest()[:12]}"


@router.get("/static/{name}")
async def get_static_file(request: Request, name: str) -> Response:
    """Return a file that pages load; it has no secrets, so anybody may read it."""
    file = files().get(name)
    if file is None:
        raise NotFound(f"there is no file {name!r}")
    return compressed(request, file.body, file.media_type, dict(_FOREVER))


@cache
def _environment() -> Environment:
    environment = make_environment(Path(__file__).parent / "templates")
    environment.globals["static"] = lambda name: below(address(name))
    environment.globals["below"] = below
    environment.filters["moment"] = wording.moment
    environment.filters["ago"] = wording.ago
    environment.filters["duration"] = duration
    environment.filters["counted"] = wording.counted
    environment.filters["share"] = wording.share
    environment.filters["capitalised"] = wording.capitalised
    environment.filters["whole"] = "{:,}".format
    return environment


def page(
    request: Request, template: str, *, status: int = HTTPStatus.OK, policy: str = POLICY, **values: Any
) -> Response:
    """Return a response with a page, or a part of one, made from a template and `values`."""
    return sent(request, render(template, **values), status=status, policy=policy)


def render(template: str, **values: Any) -> str:
    """Return the text of a page made from a template and `values`."""
    return _environment().get_template(template).render(**values)


class PageRoute(APIRoute):
    """A route whose errors are pages as well."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler that also turns errors into pages."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except problems.ANSWERED as error:
                return _error_page(request, await problems.answer(request, error))
            except Exception as error:  # a defect, which `unexpected_error` logs
                return _error_page(request, await problems.unexpected_error(request, error))

        return handle


def install(app: FastAPI) -> None:
    """Answer unknown addresses with a page for browsers and a problem document for programs."""
    app.add_exception_handler(HTTPException, _no_such_address)


async def _no_such_address(request: Request, error: Exception) -> Response:
    answer = await problems.answer(request, error)
    is_browser = "text/html" in request.headers.get("accept", "")
    return _error_page(request, answer) if is_browser else answer


def _error_page(request: Request, answer: Response) -> Response:
    if answer.media_type != problems.MEDIA_TYPE:
        return answer
    problem = Problem.model_validate_json(bytes(answer.body))
    response = page(request, "problem.html", status=answer.status_code, problem=problem, visitor=None)
    if "retry-after" in answer.headers:
        response.headers["Retry-After"] = answer.headers["retry-after"]
    return response
