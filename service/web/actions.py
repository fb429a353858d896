"""Operators' actions: each has a page that asks for confirmation, and that page's form does it."""

import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import RedirectResponse

from ablate.experiments.reporting import wording
from ablate.service.errors import Invalid
from ablate.service.http.deps import AblationId, ServicesDep
from ablate.service.http.links import below
from ablate.service.routes.ablations import cancel_ablation, load, set_priority
from ablate.service.routes.nodes import NodeName, drain_node, resume_node
from ablate.service.schemas.ablations import PriorityChange
from ablate.service.web.html import PageRoute, page
from ablate.service.web.sessions import ActingOperator, FormDep, LookingOperator

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question on a confirmation page."""

    title: str
    text: str
    """The consequences."""
    button: str
    back: str
    """Address behind "No, go back"."""
    priority: int | None = None
    """First value of the priority field; None for a form without one."""


NODE_QUESTIONS = {
    "drain": "It finishes the block that it runs and gets no other until it is resumed.",
    "resume": "It gets blocks again. Earlier breaks no longer count against it.",
}
NodeVerb = Annotated[str, Path(pattern=f"^({'|'.join(NODE_QUESTIONS)})$")]


def _ask(request: Request, question: Question, visitor: LookingOperator) -> Response:
    return page(request, "confirm.html", question=question, visitor=visitor)


def _done(address: str) -> Response:
    return RedirectResponse(below(address), HTTPStatus.SEE_OTHER, {"Cache-Control": "no-store"})


@router.get("/nodes/{name}/{verb}")
def ask_node(request: Request, name: NodeName, verb: NodeVerb, visitor: LookingOperator) -> Response:
    """Ask whether to drain or resume a node."""
    action = f"{verb.capitalize()} {name}"
    question = Question(title=f"{action}?", text=NODE_QUESTIONS[verb], button=action, back=below("/"))
    return _ask(request, question, visitor)


@router.post("/nodes/{name}/{verb}")
def change_node(name: NodeName, verb: NodeVerb, services: ServicesDep, visitor: ActingOperator) -> Response:
    """Drain or resume a node."""
    act = drain_node if verb == "drain" else resume_node
    act(name, services, visitor.principal)
    return _done("/")


@router.get("/a/{ablation_id}/cancel")
def ask_cancel(request: Request, ablation_id: AblationId, services: ServicesDep, visitor: LookingOperator) -> Response:
    """Ask whether to cancel an ablation."""
    row = load(services, ablation_id)
    text = (
        f"{wording.share(row.blocks.done, row.blocks.planned)} blocks are done and stay stored. Waiting "
        "blocks will not run, running ones are stopped, and there will be no verdict."
    )
    question = Question(
        title=f"Cancel {row.name}?", text=text, button=f"Cancel {row.name}", back=below(f"/a/{ablation_id}")
    )
    return _ask(request, question, visitor)


@router.post("/a/{ablation_id}/cancel")
def do_cancel(ablation_id: AblationId, services: ServicesDep, visitor: ActingOperator) -> Response:
    """Cancel an ablation."""
    cancel_ablation(ablation_id, services, visitor.principal)
    return _done(f"/a/{ablation_id}")


@router.get("/a/{ablation_id}/priority")
def ask_priority(
    request: Request, ablation_id: AblationId, services: ServicesDep, visitor: LookingOperator
) -> Response:
    """Ask for another priority."""
    row = load(services, ablation_id)
    text = "0 to 100; higher runs first, and equal ones take turns, a block each. Running blocks go on."
    question = Question(
        title=f"Priority of {row.name}",
        text=text,
        button="Change the priority",
        back=below(f"/a/{ablation_id}"),
        priority=row.priority,
    )
    return _ask(request, question, visitor)


@router.post("/a/{ablation_id}/priority")
def change_priority(ablation_id: AblationId, services: ServicesDep, visitor: ActingOperator, form: FormDep) -> Response:
    """Change the priority of an ablation."""
    text = form.get("priority", "")
    if not re.fullmatch("[0-9]{1,3}", text) or int(text) > 100:
        raise Invalid(f"priority {text!r} is not allowed; allowed: 0 to 100")
    change = PriorityChange(priority=int(text))
    set_priority(ablation_id, change, services, visitor.principal)
    return _done(f"/a/{ablation_id}")
