"""What operators do from a page: each action is asked for on a page of its own, and done by that page's form."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import ValidationError

from experiments.reporting import wording
from service.errors import Invalid
from service.http.deps import AblationId, ServicesDep
from service.routes.ablations import cancel_ablation, load, set_priority
from service.routes.nodes import NodeName, drain_node, resume_node
from service.schemas.ablations import PriorityChange
from service.web.html import PageRoute, page
from service.web.sessions import ActingOperator, FormDep, LookingOperator

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What an operator is asked before something happens."""

    title: str
    text: str
    """What will happen, and what will not."""
    button: str
    back: str
    """Address to which "no" leads."""
    priority: int | None = None
    """What the form's field begins with; None for a form without it."""


NODE_QUESTIONS = {
    "drain": "It finishes the block that it runs and gets no other until it is resumed.",
    "resume": "It gets blocks again. What broke on it until now does not count against it any more.",
}
NodeVerb = Annotated[str, Path(pattern=f"^({'|'.join(NODE_QUESTIONS)})$")]


def _ask(request: Request, question: Question, visitor: LookingOperator) -> Response:
    return page(request, "confirm.html", question=question, visitor=visitor)


def _done(address: str) -> Response:
    return RedirectResponse(address, HTTPStatus.SEE_OTHER, {"Cache-Control": "no-store"})


@router.get("/nodes/{name}/{verb}")
def ask_node(request: Request, name: NodeName, verb: NodeVerb, visitor: LookingOperator) -> Response:
    """Ask whether a node is to be drained or resumed."""
    wanted = f"{verb.capitalize()} {name}"
    question = Question(title=f"{wanted}?", text=NODE_QUESTIONS[verb], button=wanted, back="/")
    return _ask(request, question, visitor)


@router.post("/nodes/{name}/{verb}")
def change_node(name: NodeName, verb: NodeVerb, services: ServicesDep, visitor: ActingOperator) -> Response:
    """Drain or resume a node."""
    act = drain_node if verb == "drain" else resume_node
    act(name, services, visitor.principal)
    return _done("/")


@router.get("/a/{ablation_id}/cancel")
def ask_cancel(request: Request, ablation_id: AblationId, services: ServicesDep, visitor: LookingOperator) -> Response:
    """Ask whether an ablation is to be cancelled."""
    row = load(services, ablation_id)
    text = (
        f"{wording.share(row.blocks.done, row.blocks.planned)} blocks are done and are kept. What waits will not "
        "run, what runs is stopped, and there will be no verdict."
    )
    question = Question(title=f"Cancel {row.name}?", text=text, button=f"Cancel {row.name}", back=f"/a/{ablation_id}")
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
    text = "0 to 100; higher runs first, and equal ones take turns, a block each. Blocks that run go on."
    question = Question(
        title=f"Priority of {row.name}",
        text=text,
        button="Change the priority",
        back=f"/a/{ablation_id}",
        priority=row.priority,
    )
    return _ask(request, question, visitor)


@router.post("/a/{ablation_id}/priority")
def change_priority(ablation_id: AblationId, services: ServicesDep, visitor: ActingOperator, form: FormDep) -> Response:
    """Change the priority of an ablation."""
    given = form.get("priority", "")
    if not given.isascii() or not given.isdigit():
        raise Invalid(f"priority {given!r} is not a whole number; allowed: 0 to 100")
    try:
        change = PriorityChange(priority=int(given[:9]))
    except ValidationError as error:
        raise Invalid(f"priority {given} is not allowed; allowed: 0 to 100") from error
    set_priority(ablation_id, change, services, visitor.principal)
    return _done(f"/a/{ablation_id}")
