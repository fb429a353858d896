"""Routes of the pages: overview, ablation, nodes, sessions, history of a gate; their live parts and event streams."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import RedirectResponse

from ablate.service.errors import NotFound
from ablate.service.http import links
from ablate.service.http.deps import AblationId, ServicesDep
from ablate.service.http.event_streams import streams_of
from ablate.service.http.links import below
from ablate.service.routes.history import read_noise
from ablate.service.routes.nodes import nodes_public
from ablate.service.routes.sessions import SessionName
from ablate.service.store.ablations import names
from ablate.service.store.ablations.ablations import last_event
from ablate.service.store.ablations.results import latest_experiment, read_report
from ablate.service.store.nodes import nodes
from ablate.service.web.ablation_page import ablation_page, live_part, trace_of
from ablate.service.web.compare_page import compare_page
from ablate.service.web.history_page import history_page
from ablate.service.web.html import PICTURE_POLICY, PageRoute, compressed, page
from ablate.service.web.nodes_page import node_lines, nodes_page
from ablate.service.web.overview import SHOWN, overview
from ablate.service.web.session_page import session_page, sessions_table
from ablate.service.web.sessions import ReadingVisitor

router = APIRouter(include_in_schema=False, route_class=PageRoute)

Called = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,80}$")]
OrNone = Annotated[str, Query(pattern=r"^[A-Za-z0-9_-]{0,80}$")]
Shown = Annotated[str, Query(pattern=f"^({'|'.join(SHOWN)})$")]
Words = Annotated[str, Query(max_length=200)]
After = Annotated[int, Query(ge=0, le=10**18)]
LastEvent = Annotated[int | None, Header(alias="Last-Event-ID", ge=0, le=10**18)]


@router.get("/")
def show_overview(
    request: Request, services: ServicesDep, visitor: ReadingVisitor, show: Shown = "all", q: Words = ""
) -> Response:
    """Show the ablations with their answers, the queue, and the nodes."""
    return _overview(request, services, visitor, "overview.html", show, q)


@router.get("/live")
def show_live_overview(
    request: Request, services: ServicesDep, visitor: ReadingVisitor, show: Shown = "all", q: Words = ""
) -> Response:
    """Return the live parts of that page."""
    return _overview(request, services, visitor, "overview_live.html", show, q)


def _overview(
    request: Request, services: ServicesDep, visitor: ReadingVisitor, template: str, show: str, words: str
) -> Response:
    with services.store.read() as connection:
        seq = last_event(connection)
        view = overview(connection, services.settings, read_noise(connection), show, words)
    return page(request, template, view=view, shown=SHOWN, seq=seq, visitor=visitor)


@router.get("/mlflow-ablations")
def show_mlflow(services: ServicesDep, visitor: ReadingVisitor) -> Response:
    """Redirect to MLflow's list of ablations."""
    with services.store.read() as connection:
        experiment_id = latest_experiment(connection)
    address = links.of_ablations(services.settings.mlflow_link_url, experiment_id)
    return RedirectResponse(address, HTTPStatus.SEE_OTHER, {"Cache-Control": "no-store"})


@router.get("/events", response_class=Response)
async def stream_changes(
    request: Request, visitor: ReadingVisitor, after: After = 0, last_event_id: LastEvent = None
) -> Response:
    """Stream an event for every change of any ablation."""
    return streams_of(request).of_all(visitor.principal, after if last_event_id is None else last_event_id)


@router.get("/a/{called}")
def show_ablation(request: Request, called: Called, services: ServicesDep, visitor: ReadingVisitor) -> Response:
    """Show an ablation by its id; redirect from a name, the beginning of an id, and `latest`."""
    with services.store.read() as connection:
        ablation_id = names.find_ablation(connection, called)
        if ablation_id != called:
            return RedirectResponse(below(f"/a/{ablation_id}"), HTTPStatus.SEE_OTHER, {"Cache-Control": "no-store"})
        view = ablation_page(connection, services.settings, ablation_id, visitor.principal)
    return page(request, "ablation.html", policy=PICTURE_POLICY, view=view, live=view.live, visitor=visitor)


@router.get("/a/{ablation_id}/live")
def show_live_ablation(
    request: Request, ablation_id: AblationId, services: ServicesDep, visitor: ReadingVisitor
) -> Response:
    """Return the live parts of that page."""
    with services.store.read() as connection:
        live = live_part(connection, services.settings, ablation_id)
    return page(request, "ablation_live.html", live=live)


@router.get("/a/{ablation_id}/traces/{arm}.json")
def get_trace(
    request: Request, ablation_id: AblationId, arm: Called, services: ServicesDep, visitor: ReadingVisitor
) -> Response:
    """Return an arm's profiled step over time, as a file for a trace viewer."""
    with services.store.read() as connection:
        text = trace_of(connection, ablation_id, arm)
    headers = {"Content-Disposition": f'attachment; filename="{arm}.trace.json"', "Cache-Control": "no-store"}
    return compressed(request, text.encode(), "application/json", {**headers, "Vary": "Accept-Encoding, Cookie"})


@router.get("/a/{ablation_id}/report.html")
def get_report_file(
    request: Request, ablation_id: AblationId, services: ServicesDep, visitor: ReadingVisitor
) -> Response:
    """Return the report as one file to keep or to send."""
    with services.store.read() as connection:
        document = read_report(connection, ablation_id)
    if document is None:
        raise NotFound(f"ablation {ablation_id} has no report yet")
    headers = {"Content-Disposition": f'attachment; filename="{ablation_id}.html"', "Cache-Control": "no-store"}
    return compressed(request, document.encode(), "text/html", {**headers, "Vary": "Accept-Encoding, Cookie"})


@router.get("/a/{ablation_id}/events", response_class=Response)
async def stream_ablation(
    request: Request,
    ablation_id: AblationId,
    visitor: ReadingVisitor,
    after: After = 0,
    last_event_id: LastEvent = None,
) -> Response:
    """Stream the ablation's events, like the REST interface."""
    position = after if last_event_id is None else last_event_id
    return await streams_of(request).of_ablation(visitor.principal, ablation_id, position)


@router.get("/compare")
def show_comparison(
    request: Request, services: ServicesDep, visitor: ReadingVisitor, a: OrNone = "", b: OrNone = ""
) -> Response:
    """Show two ablations side by side, or the choice of them."""
    with services.store.read() as connection:
        view = compare_page(connection, services.settings, a, b)
    return page(request, "compare.html", view=view, visitor=visitor)


@router.get("/nodes")
def show_nodes(request: Request, services: ServicesDep, visitor: ReadingVisitor) -> Response:
    """Show which lanes and back ends work on which node, with versions."""
    with services.store.read() as connection:
        every = nodes_public(connection, services.settings)
        lines = node_lines(every, read_noise(connection), nodes.newest_loads(connection))
    return page(request, "nodes.html", nodes=lines, classes=nodes_page(every), visitor=visitor)


@router.get("/sessions")
def show_sessions(request: Request, services: ServicesDep, visitor: ReadingVisitor) -> Response:
    """Show all sessions."""
    with services.store.read() as connection:
        table = sessions_table(connection)
    return page(request, "sessions.html", table=table, visitor=visitor)


@router.get("/sessions/{name}")
def show_session(request: Request, name: SessionName, services: ServicesDep, visitor: ReadingVisitor) -> Response:
    """Show the path of a session."""
    with services.store.read() as connection:
        view = session_page(connection, name, visitor.principal, services.settings)
    return page(request, "session.html", view=view, visitor=visitor)


@router.get("/history/{recipe}/{gate}")
def show_history(request: Request, recipe: str, gate: str, services: ServicesDep, visitor: ReadingVisitor) -> Response:
    """Show all answers about a gate with a recipe, and the baseline over time."""
    with services.store.read() as connection:
        view = history_page(connection, recipe, gate)
    return page(request, "history.html", view=view, visitor=visitor)
