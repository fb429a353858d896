"""The MCP server of `ablate mcp`: what commands do, as tools for agents, and specs and receipts as resources.

Each call has a client of its own, with the token of its caller. A tool runs in a thread, so its waiting holds up
nobody else.
"""

import functools
import json
import time
from collections.abc import Callable, Mapping
from enum import Enum
from http import HTTPStatus
from importlib.metadata import version
from itertools import islice
from typing import Annotated, Any, TypeAlias

import anyio.from_thread
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError
from mcp.server.mcpserver.tools import Tool
from mcp_types import CallToolResult, TextContent, ToolAnnotations
from pydantic import BaseModel, Field
from rich.console import RenderableType

from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.catalog.files import read_catalog_file
from ablate.experiments.design.spec import ablation_json_schema
from ablate.experiments.errors import ExperimentError
from ablate.experiments.outcomes import AblationState
from ablate.experiments.reporting.terminal.markdown import pull_request_markdown
from ablate.experiments.system.logs import visible
from ablate.service.cli import proposing, tables, verdict_tables
from ablate.service.cli.arguments import ABLATION_NAMES
from ablate.service.cli.output import plain_text, problem_lines, problem_of
from ablate.service.cli.verdicts import asked
from ablate.service.client.ablations import StillRunning
from ablate.service.client.api import Client
from ablate.service.client.connection import ClientError, Refused
from ablate.service.errors import ServiceError
from ablate.service.lifecycle import OVER
from ablate.service.schemas.ablations import AblationPublic
from ablate.service.schemas.problems import Problem
from ablate.service.schemas.sessions import ProposalAnswer, SessionList, SessionPath
from ablate.service.schemas.submissions import PlanPublic, SpecBody

INSTRUCTIONS = (
    "Ablate measures whether a change to a training program is better. The rule is fixed before the first sample. "
    "`plan` is free; `ask` and `try` spend device time. Write a spec by the schema in ablate://schema, or begin with a "
    "spec of ablate://catalog/command (your own program) or ablate://catalog/demo. To try many changes, open a session "
    "and propose them one by one with `try`: they share one error budget, and each proposal spends a part of it. Only "
    "a decision 'adopt' or an outcome 'keep' is proof; 'inconclusive' and 'undecided' prove nothing. What was started "
    "goes on when a call ends early: `status` finds it."
)
_TRIALS_SHOWN = 40
_LOG_SHOWN = 20_000
"""Last characters of a log."""

Call: TypeAlias = Context[Any, Any]
SpecArgument = Annotated[
    str | dict[str, Any],
    Field(
        description="A spec as YAML text or as an object (schema: ablate://schema). Over stdio, its folders of code "
        "are relative to the folder where the server was started; over HTTP it names code that the service has."
    ),
]
AblationArgument = Annotated[str, Field(description=f"The ablation: {ABLATION_NAMES}.")]
SessionArgument = Annotated[str, Field(description="The session's name.")]
ProposalArgument = Annotated[
    str | dict[str, Any] | list[str],
    Field(
        description="A spec with one variant, made from that of `session`. Or the words of a command, for a session of "
        "commands: it begins with the session's command; its other arguments replace the incumbent's of the same name."
    ),
]
NoteArgument = Annotated[str, Field(description="What you change and why, in one line.")]
KeyArgument = Annotated[
    str, Field(description="A text of your choice: the same call with the same key is submitted once.")
]
WaitArgument = Annotated[
    float | None,
    Field(ge=0, description="Return after so many seconds although it still runs. Default: wait for the end."),
]


def make_server() -> MCPServer[Any]:
    """Return the server with its tools and resources."""
    server: MCPServer[Any] = MCPServer(
        "ablate",
        instructions=INSTRUCTIONS,
        version=version("ablate"),
        log_level="WARNING",
        tools=[_tool(call, kind) for kind, calls in _TOOLS.items() for call in calls],
    )
    for uri, read, mime_type in _RESOURCES:
        server.resource(uri, mime_type=mime_type)(_resource(read))
    return server


def _tool(call: Callable[..., CallToolResult], kind: "_Kind") -> Tool:
    """Return a tool whose errors are problem documents, and which refuses arguments that it does not have."""

    @functools.wraps(call)
    def answered(*args: Any, **values: Any) -> CallToolResult:
        try:
            return call(*args, **values)
        except _ERRORS as error:
            problem = problem_of(error)
            return CallToolResult(
                is_error=True,
                content=[TextContent(type="text", text=plain_text(*problem_lines(problem)))],
                structured_content=problem.model_dump(mode="json"),
            )

    tool = Tool.from_function(answered, name=call.__name__.rstrip("_"), annotations=kind.value)
    arguments = tool.fn_metadata.arg_model
    arguments.model_config["extra"] = "forbid"
    arguments.model_rebuild(force=True)
    tool.parameters = arguments.model_json_schema()
    return tool


def _resource(read: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(read)
    def text(*args: Any, **values: Any) -> str:
        try:
            return read(*args, **values)
        except _ERRORS as error:
            problem = problem_of(error)
            kind = ResourceNotFoundError if problem.status == HTTPStatus.NOT_FOUND else ResourceError
            raise kind(plain_text(*problem_lines(problem))) from error

    return text


def _client(ctx: Call) -> Client:
    """Return a client with the caller's token, over stdio with that of the settings. Raises Refused without one."""
    if ctx.headers is None:
        return Client()
    scheme, _, token = ctx.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        detail = "this server has no rights of its own: send the header 'Authorization: Bearer TOKEN' with your token; "
        detail += "an administrator creates one: ablate admin tokens create NAME --scope submit"
        raise Refused(Problem(title="Unauthorized", status=HTTPStatus.UNAUTHORIZED, detail=detail))
    return Client(token=token)


def _body(ctx: Call, spec: str | Mapping[str, Any]) -> SpecBody:
    """Return a spec to send. Folders of code are packed over stdio only: other callers have no files here."""
    content, content_type = (json.dumps(spec), "application/json")
    if isinstance(spec, str):
        content, content_type = spec, "application/yaml"
    if ctx.headers is None:
        return SpecBody.packed(content.encode(), content_type)
    return SpecBody(content=content.encode(), content_type=content_type)


def _answer(model: BaseModel | None, *parts: RenderableType, text: str = "") -> CallToolResult:
    """Return the parts as a file would get them, then `text`, for the agent; and the model as structured content."""
    values = {} if model is None else {"structured_content": model.model_dump(mode="json", by_alias=True)}
    return CallToolResult(content=[TextContent(type="text", text=plain_text(*parts) + text)], **values)


def _waited(ctx: Call, client: Client, ablation: str, wait_s: float | None) -> AblationPublic:
    """Wait for the end of an ablation, at most `wait_s`, with progress, and return its state.

    Progress is the time that it takes, because MCP wants it to grow with every message. If the caller leaves, only the
    waiting ends.
    """
    began = time.monotonic()

    def tell(row: AblationPublic) -> None:
        anyio.from_thread.check_cancelled()
        passed_s = time.monotonic() - began
        total_s = None if row.time_left_s is None else passed_s + row.time_left_s
        reason = f"; waits for {row.waiting_for}" if row.waiting_for else ""
        message = f"{row.id}: {row.state}, blocks {tables.blocks(row)}{reason}"
        anyio.from_thread.run(ctx.report_progress, passed_s, total_s, message)

    try:
        return client.ablations.wait(ablation, timeout_s=wait_s, each=tell)
    except StillRunning:
        return client.ablations.get(ablation)


def _ended(client: Client, row: AblationPublic) -> RenderableType:
    """Return the verdict of an ablation, or its state if it has none."""
    if row.state not in OVER or row.state == AblationState.CANCELLED:
        return tables.ablation(row, [])
    return verdict_tables.verdict(client.ablations.verdict(row.id))


def plan(ctx: Call, spec: SpecArgument) -> Annotated[CallToolResult, PlanPublic]:
    """Show the trials of a spec, the nodes for them, and the effect that they can detect. Stores nothing."""
    with _client(ctx) as client:
        answer = client.ablations.plan(_body(ctx, spec))
    return _answer(answer, tables.plan(answer))


def ask(
    ctx: Call, spec: SpecArgument, idempotency_key: KeyArgument = "", wait_s: WaitArgument = None
) -> Annotated[CallToolResult, AblationPublic]:
    """Submit a spec, wait for its end, and show the verdict. Spends device time.

    The ablation goes on if the call ends early; its id is in the first progress message. See `status`.
    """
    with _client(ctx) as client:
        accepted = client.ablations.submit(_body(ctx, spec), idempotency_key=idempotency_key or None)
        row = _waited(ctx, client, accepted.id, wait_s)
        return _answer(row, tables.remarks(accepted), _ended(client, row))


def status(
    ctx: Call, ablation: AblationArgument = "latest", wait_s: WaitArgument = 0
) -> Annotated[CallToolResult, AblationPublic]:
    """Show an ablation and its first trials, at once or after its end. Its text names trials and why they failed."""
    with _client(ctx) as client:
        row = _waited(ctx, client, client.ablations.id_of(ablation), wait_s)
        return _answer(row, tables.ablation(row, list(islice(client.ablations.trials(row.id), _TRIALS_SHOWN))))


def verdict(ctx: Call, ablation: AblationArgument) -> Annotated[CallToolResult, Verdict]:
    """Show the verdict of an ablation that is over."""
    with _client(ctx) as client:
        answer = client.ablations.verdict(client.ablations.id_of(ablation))
    return _answer(answer, verdict_tables.verdict(answer))


def why(ctx: Call, ablation: AblationArgument) -> CallToolResult:
    """Show the reasons of a verdict: requirements, variants against each other, kernels or operators that differ."""
    with _client(ctx) as client:
        answer = client.ablations.verdict(client.ablations.id_of(ablation))
    return _answer(None, *verdict_tables.reasons(answer))


def report(ctx: Call, ablation: AblationArgument) -> CallToolResult:
    """Return the question, the verdict and its evidence as Markdown, with a link to the page, for a pull request."""
    with _client(ctx) as client:
        row = asked(client, name := client.ablations.id_of(ablation))
        return _answer(None, text=pull_request_markdown(client.ablations.verdict(name), None, row))


def cancel(ctx: Call, ablation: AblationArgument) -> Annotated[CallToolResult, AblationPublic]:
    """Cancel an ablation. Its measurements are kept; a proposal has spent its level."""
    with _client(ctx) as client:
        row = client.ablations.cancel(client.ablations.id_of(ablation))
    return _answer(row, tables.ablation(row, []))


def sessions(ctx: Call) -> Annotated[CallToolResult, SessionList]:
    """List all sessions, newest first."""
    with _client(ctx) as client:
        rows = client.sessions.list()
    return _answer(SessionList(items=rows), tables.sessions(rows))


def session(ctx: Call, name: SessionArgument) -> Annotated[CallToolResult, SessionPath]:
    """Show a session: its proposals with levels and answers, and the incumbent's spec, to make the next one of."""
    with _client(ctx) as client:
        return _path(client.sessions.get(name))


def open_session(ctx: Call, name: SessionArgument, spec: SpecArgument) -> Annotated[CallToolResult, SessionPath]:
    """Open a session whose incumbent is the baseline of a spec. Nothing runs, and its variants are not proposed."""
    with _client(ctx) as client:
        return _path(client.sessions.open(name, _body(ctx, spec)))


def close_session(ctx: Call, name: SessionArgument) -> Annotated[CallToolResult, SessionPath]:
    """Close a session for good. It takes no more proposals; a running one ends by itself."""
    with _client(ctx) as client:
        return _path(client.sessions.close(name))


def _path(path: SessionPath) -> CallToolResult:
    return _answer(path, tables.session(path), text=f"\n\n{path.spec}")


def try_(
    ctx: Call,
    session: SessionArgument,
    proposal: ProposalArgument,
    note: NoteArgument = "",
    idempotency_key: KeyArgument = "",
    wait_s: WaitArgument = None,
) -> Annotated[CallToolResult, ProposalAnswer]:
    """Propose one change of a session's incumbent, wait, and say: keep, discard or undecided. Spends device time.

    Each proposal spends a part of the session's error budget, also an undecided, broken or cancelled one. It goes on if
    the call ends early; see `session`.
    """
    with _client(ctx) as client:
        if isinstance(proposal, list):
            proposal = proposing.values_of_command(client.sessions.get(session), proposal)
        body = _body(ctx, proposal)
        body = proposing.noted(body, note) if note else body
        accepted = client.sessions.propose(session, body, idempotency_key=idempotency_key or None)
        row = _waited(ctx, client, accepted.accepted.id, wait_s)
        answer = client.sessions.answer(accepted)
        lines = [proposing.heading(accepted), tables.remarks(accepted.accepted), _ended(client, row)]
        return _answer(answer, *lines, *([proposing.closing(answer)] if answer.outcome else []))


def schema() -> str:
    """Return the JSON Schema of a spec."""
    return json.dumps(ablation_json_schema())


def catalog_spec(name: str) -> str:
    """Return a spec that ships with Ablate, to begin with."""
    return read_catalog_file(name).decode()


def ablation_spec(ctx: Call, ablation: str) -> str:
    """Return the spec of an ablation as it was submitted."""
    with _client(ctx) as client:
        return client.ablations.spec(client.ablations.id_of(ablation)).content.decode()


def receipt(ctx: Call, trial: str) -> str:
    """Return the receipt of a trial with its block's signature."""
    with _client(ctx) as client:
        return client.trials.receipt(trial).model_dump_json()


def log(ctx: Call, trial: str) -> str:
    """Return the end of a trial's log."""
    with _client(ctx) as client:
        return visible(client.trials.log(trial)[0])[-_LOG_SHOWN:]


class _Kind(Enum):
    """What a tool may do."""

    READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    SPENDS = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=False, open_world_hint=False)
    """Device time, and a part of an error budget."""
    OPENS = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
    ENDS = ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False)


_TOOLS: Mapping[_Kind, tuple[Callable[..., CallToolResult], ...]] = {
    _Kind.READS: (plan, status, verdict, why, report, sessions, session),
    _Kind.SPENDS: (ask, try_),
    _Kind.OPENS: (open_session,),
    _Kind.ENDS: (cancel, close_session),
}
_RESOURCES: tuple[tuple[str, Callable[..., str], str], ...] = (
    ("ablate://schema", schema, "application/schema+json"),
    ("ablate://catalog/{name}", catalog_spec, "application/yaml"),
    ("ablate://ablations/{ablation}/spec", ablation_spec, "application/yaml"),
    ("ablate://trials/{trial}/receipt", receipt, "application/json"),
    ("ablate://trials/{trial}/log", log, "text/plain"),
)
_ERRORS = (ClientError, ExperimentError, ServiceError, OSError)
