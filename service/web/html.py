"""Pages from templates, the errors among them."""

from collections.abc import Callable, Coroutine
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from jinja2 import Environment
from starlette.exceptions import HTTPException

from experiments.reporting import wording
from experiments.reporting.pages.page_templates import make_environment
from experiments.reporting.wording import duration
from service.http import problems
from service.schemas.problems import Problem
from service.web import static_files
from service.web.sending import POLICY, sent


@cache
def _environment() -> Environment:
    environment = make_environment(Path(__file__).parent / "templates")
    environment.globals["static"] = static_files.address
    environment.filters["moment"] = wording.moment
    environment.filters["duration"] = duration
    environment.filters["counted"] = wording.counted
    environment.filters["share"] = wording.share
    environment.filters["whole"] = "{:,}".format
    return environment


def page(
    request: Request, template: str, *, status: int = HTTPStatus.OK, policy: str = POLICY, **values: Any
) -> Response:
    """Send a page, or a part of one, made from a template and `values`."""
    return sent(request, render(template, **values), status=status, policy=policy)


def render(template: str, **values: Any) -> str:
    """Return the text of a page made from a template and `values`."""
    return _environment().get_template(template).render(**values)


class PageRoute(APIRoute):
    """A route whose errors are pages as well."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler that turns what has an answer into a page that says it."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except problems.ANSWERED as error:
                return _error_page(request, await problems.answer(request, error))
            except Exception as error:  # our own mistake, which is in the log
                return _error_page(request, await problems.unexpected_error(request, error))

        return handle


def install(app: FastAPI) -> None:
    """Let a browser that asks for an address that there is not get a page; programs get a problem document."""
    app.add_exception_handler(HTTPException, _no_such_address)


async def _no_such_address(request: Request, error: Exception) -> Response:
    answer = await problems.answer(request, error)
    is_browser = "text/html" in request.headers.get("accept", "")
    return _error_page(request, answer) if is_browser else answer


def _error_page(request: Request, answer: Response) -> Response:
    if answer.media_type != problems.MEDIA_TYPE:
        return answer
    found = Problem.model_validate_json(bytes(answer.body))
    made = page(request, "problem.html", status=answer.status_code, problem=found, visitor=None)
    if "retry-after" in answer.headers:
        made.headers["Retry-After"] = answer.headers["retry-after"]
    return made
