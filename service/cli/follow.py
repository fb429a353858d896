"""Submit a spec, follow its ablation and print how it ended.

Progress is live on a terminal and line by line elsewhere. Leaving with Ctrl-C cancels nothing.
"""

import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from ablate.experiments.block_numbers import block_name
from ablate.experiments.outcomes import AblationState, BlockState, ExitCode, TrialState
from ablate.experiments.reporting import wording
from ablate.service.cli import tables
from ablate.service.cli.output import err, html, out, plain_text, print_json_line
from ablate.service.client.api import Client
from ablate.service.lifecycle import OVER, REPORTED, EventKind
from ablate.service.schemas.ablations import AblationPublic, Event, TrialPublic
from ablate.service.schemas.nodes import NodePublic
from ablate.service.schemas.submissions import AblationAccepted, SpecBody

if TYPE_CHECKING:
    from ablate.experiments.analysis.verdicts import Verdict

_POLL_S = 0.5
_REFRESH_S = 2.0
"""Time between requests for the queue position while no event arrives."""
_LINE_S = 10.0
"""Time between lines about a running trial where the output is not a terminal."""

PrintEnd: TypeAlias = Callable[[Client, str], None]
"""Prints the end of the ablation with this id, in place of its verdict."""

KeyOption = Annotated[
    str | None,
    typer.Option(help="Submitting the same spec with the same key returns the same ablation. Default: a new ablation."),
]


def run_spec(
    spec: SpecBody, *, idempotency_key: str | None = None, as_json: bool, print_end: PrintEnd | None = None
) -> "tuple[str, Verdict]":
    """Submit `spec`, follow its ablation, print its end (by default its verdict), and return its id and its verdict."""
    with Client() as client:
        answer = client.ablations.submit(spec, idempotency_key=idempotency_key)
        print_json_line(accepted=answer) if as_json else print_accepted(out(), answer)
        return answer.id, follow_to_end(client, answer.id, as_json=as_json, print_end=print_end)


def print_accepted(console: Console, answer: AblationAccepted) -> None:
    """Print the accepted ablation, remarks on it, and the commands that usually come next."""
    console.print(f"[bold]{escape(answer.name)}[/] accepted as [bold]{answer.id}[/] ({answer.state})")
    console.print(tables.remarks(answer))
    console.print(f"  follow   ablate watch {answer.id}")
    console.print(f"  answer   ablate verdict {answer.id} --explain")
    console.print(f"  stop     ablate cancel {answer.id}")


def follow_to_end(client: Client, ablation_id: str, *, as_json: bool, print_end: PrintEnd | None = None) -> "Verdict":
    """Follow an ablation, print its end and return its verdict. Exits with 5 if the ablation failed or was cancelled.

    Ctrl-C exits with 130.
    """
    try:
        row = follow_as_json(client, ablation_id) if as_json else follow(client, ablation_id, out())
    except KeyboardInterrupt:
        err().print(f"detached; {ablation_id} goes on. Come back: ablate watch {ablation_id}")
        raise typer.Exit(ExitCode.DETACHED) from None
    verdict = None if row.state == AblationState.CANCELLED else client.ablations.verdict(ablation_id)
    if as_json:
        print_json_line(ablation=row, **({} if verdict is None else {"verdict": verdict}))
    elif print_end is not None and row.state == AblationState.COMPLETED:
        print_end(client, ablation_id)
    else:
        _print_verdict(row, verdict)
    if verdict is None or row.state != AblationState.COMPLETED:
        raise typer.Exit(ExitCode.ERROR)
    return verdict


def _print_verdict(row: AblationPublic, verdict: "Verdict | None") -> None:
    if verdict is None:
        out().print(f"{row.id} was cancelled. Its measurements are kept: ablate show {row.id}")
        return
    if row.state == AblationState.FAILED:
        reason = row.answer or f"{wording.counted(row.blocks.failed, 'block')} could not run"
        out().print(f"{row.id} [red]failed[/]: {escape(reason)}; ablate show {row.id}")
    from ablate.service.cli import verdict_tables  # slow to import, and only needed at the end

    out().print(verdict_tables.verdict(verdict))


def follow(client: Client, ablation_id: str, console: Console) -> AblationPublic:
    """Print the progress of an ablation until it is over, and return its last state. Lets KeyboardInterrupt pass."""
    row, trials = client.ablations.get(ablation_id), client.ablations.trials(ablation_id)
    followed = FollowedAblation.of(row, trials, client.nodes())
    if console.is_terminal or console.is_jupyter:
        view = _LiveView(followed)
        with in_place(console) as show:
            for _ in _updates(client, followed):
                view.update(followed)
                show(view)
                for line in followed.kept:
                    console.print(escape(line))
                followed.kept.clear()
    else:
        _follow_in_lines(client, followed, console)
    return followed.ablation


@contextmanager
def in_place(console: Console) -> Iterator[Callable[[RenderableType], None]]:
    """Yield a function that shows its argument in place of the last one; below it where nothing can be replaced."""
    if console.is_jupyter:
        from IPython.display import display  # rich's own way needs ipywidgets

        shown = display({"text/plain": ""}, raw=True, display_id=True)
        yield lambda part: shown.update({"text/plain": plain_text(part), "text/html": html(part)}, raw=True)
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            yield live.update
    else:
        yield console.print


def follow_as_json(client: Client, ablation_id: str) -> AblationPublic:
    """Print every event as a line of JSON, and return the ablation's last state."""
    for event in client.ablations.watch(ablation_id):
        print_json_line(event=event)
    return client.ablations.get(ablation_id)


class TrialPlace(NamedTuple):
    """The block and the arm of a trial: little memory, because an ablation may have 100,000 trials."""

    block_id: str
    arm: str


@dataclass
class FollowedAblation:
    """The state of a followed ablation, kept up to date by its events."""

    ablation: AblationPublic
    trials: dict[str, "TrialPlace"]
    """By id."""
    names: dict[str, str]
    """Display names of blocks by id: "block 2/6"."""
    nodes: dict[str, str] = field(default_factory=dict)
    """Names of nodes by id."""
    current: "TrialPlace | None" = None
    steps: str = ""
    holders: dict[str, str] = field(default_factory=dict)
    """Ids of the nodes that run blocks, or ran them last, by block id."""
    lines: list[str] = field(default_factory=list)
    """Changes of state since the last update, for output in lines."""
    kept: list[str] = field(default_factory=list)
    """Those of them that stay on a terminal: blocks that ended, attempts without a result and trials without a
    measurement, with the reason."""
    not_run: str = ""
    """Why blocks were cancelled, which is one line for all of them."""
    failed: set[str] = field(default_factory=set)
    """Ids of the trials whose failure is among the lines."""

    @classmethod
    def of(
        cls, ablation: AblationPublic, trials: Iterable[TrialPublic], nodes: Iterable[NodePublic] = ()
    ) -> "FollowedAblation":
        """Return the state that the service's rows describe."""
        by_id: dict[str, TrialPlace] = {}
        names: dict[str, str] = {}
        for trial in trials:
            block, arm = sys.intern(trial.block_id), sys.intern(trial.arm)
            by_id[trial.id] = TrialPlace(block, arm)
            names[block] = block_name(trial.block_index, ablation.blocks.planned)
        return cls(ablation=ablation, trials=by_id, names=names, nodes={node.id: node.name for node in nodes})

    def apply(self, event: Event) -> None:
        """Update the state with one event."""
        trial = self.trials.get(event.subject or "")
        if event.kind == EventKind.TRIAL_PROGRESS and trial is not None:
            self.current, self.steps = trial, steps_text(event)
            self._fail(event, (event.data or {}).get("failure"))
        elif event.kind == EventKind.TRIAL_STATE and trial is not None:
            self._change_trial(event, trial)
        elif event.kind in (EventKind.BLOCK_STATE, EventKind.ABLATION_STATE):
            self._change_state(event)

    def _change_trial(self, event: Event, trial: "TrialPlace") -> None:
        if event.went_to == TrialState.RUNNING:
            self.current, self.steps = trial, ""
        elif event.went_to == TrialState.QUEUED:
            self.failed.discard(event.subject or "")
        elif event.went_to == TrialState.DONE and event.reason != REPORTED:
            self._fail(event, event.reason)

    def _fail(self, event: Event, why: str | None) -> None:
        """Note the failure of a trial once: its heartbeat reports it first, and the report of its block again."""
        if why is None or event.subject is None or event.subject in self.failed:
            return
        self.failed.add(event.subject)
        block, arm = self.trials[event.subject]
        self.lines.append(f"{event.at[11:19]}  {self.names[block]}{self._on_node(block)}: {arm} failed: {why}")
        self.kept.append(self.lines[-1])

    def _change_state(self, event: Event) -> None:
        block = event.subject or ""
        if event.kind == EventKind.BLOCK_STATE and event.went_to == BlockState.RUNNING and event.actor:
            self.holders[block] = event.actor
        if self._ends_current(event):
            self.current, self.steps = None, ""
        if event.kind == EventKind.BLOCK_STATE and event.went_to == BlockState.CANCELLED:
            if event.reason == self.not_run:
                return
            self.not_run = event.reason or ""
        name = self.names.get(block, self.ablation.name)
        self.lines.append(history_line(event, f"{name}{self._on_node(block)}"))
        if event.kind == EventKind.BLOCK_STATE and event.came_from == BlockState.RUNNING:
            self.kept.append(self.lines[-1])

    def _ends_current(self, event: Event) -> bool:
        """Return whether the running trial's block stops: it is over, or back in the queue."""
        own = self.current is not None and event.subject == self.current.block_id
        return own and event.kind == EventKind.BLOCK_STATE and event.went_to != BlockState.RUNNING

    def _on_node(self, block: str) -> str:
        """Return the node of a block, for example " on gpu-7"; empty before a node has it."""
        name = self.nodes.get(self.holders.get(block, ""))
        return f" on {name}" if name else ""

    @property
    def over(self) -> bool:
        """Whether the ablation is in a final state."""
        return self.ablation.state in OVER

    @property
    def trial_text(self) -> str:
        """The running arm and its progress, or the thing that the ablation waits for."""
        if self.ablation.waiting_for:
            return f"waits for {self.ablation.waiting_for}{self._time_left}"
        if self.current is None or self.over:
            return ""
        block = self.current.block_id
        place = f"{self.names[block]}{self._on_node(block)}, {self.current.arm}"
        return f"{place}: {self.steps or 'runs'}{self._time_left}"

    @property
    def waits_for(self) -> str:
        """The thing that the ablation waits for, without numbers and names that change; empty if it does not wait."""
        return re.sub(r"\d+", "", (self.ablation.waiting_for or "").partition(":")[0])

    @property
    def _time_left(self) -> str:
        text = tables.time_left(self.ablation)
        return text and f"; {text}"


def steps_text(event: Event) -> str:
    """Return the steps, tokens per second and loss of a progress event."""
    values = event.data or {}
    parts = [f"step {values.get('steps_done') or 0}/{values.get('steps_total') or '?'}"]
    if values.get("tokens_per_s") is not None:
        parts.append(f"{wording.number(values['tokens_per_s'])} tokens/s")
    if values.get("loss") is not None:
        parts.append(f"loss {wording.fixed(values['loss'], 3)}")
    return ", ".join(parts)


def history_line(event: Event, name: str) -> str:
    """Return one line about the new state of `name`, with the UTC time of day."""
    reason = f" ({event.reason})" if event.reason else ""
    return f"{event.at[11:19]}  {name}: {event.went_to}{reason}"


def _follow_in_lines(client: Client, followed: FollowedAblation, console: Console) -> None:
    printed, printed_at = "", 0.0
    for _ in _updates(client, followed):
        for line in followed.lines:
            console.print(escape(line))
        followed.lines.clear()
        text = followed.trial_text
        kind = followed.waits_for or text
        if text and kind != printed and time.monotonic() - printed_at >= _LINE_S:
            console.print(escape(f"{datetime.now(UTC):%H:%M:%S}  {text}"))
            printed, printed_at = kind, time.monotonic()


def _updates(client: Client, followed: FollowedAblation) -> Iterator[None]:
    """Keep `followed` up to date. Yields after every change, and at least every half second."""
    events: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
    threading.Thread(target=_read_events, args=(client, followed.ablation.id, events), daemon=True).start()
    refreshed_at, ended = time.monotonic(), False
    while not ended:
        changed = False
        for item in _available(events):
            if isinstance(item, Exception):
                raise item
            followed.apply(item)
            changed = changed or item.kind != EventKind.TRIAL_PROGRESS
            ended = ended or item.kind == EventKind.END
        if changed or time.monotonic() - refreshed_at > _REFRESH_S:
            followed.ablation = client.ablations.get(followed.ablation.id)
            if not followed.nodes.keys() >= set(followed.holders.values()):  # a node registered meanwhile
                followed.nodes = {node.id: node.name for node in client.nodes()}
            refreshed_at = time.monotonic()
        yield


def _available(events: "queue.SimpleQueue[Event | Exception]") -> Iterator[Event | Exception]:
    try:
        yield events.get(timeout=_POLL_S)
        while True:
            yield events.get_nowait()
    except queue.Empty:
        return


def _read_events(client: Client, ablation_id: str, events: "queue.SimpleQueue[Event | Exception]") -> None:
    try:
        for event in client.ablations.watch(ablation_id):
            events.put(event)
    except Exception as error:  # the thread's boundary: the consumer raises it
        events.put(error)


class _LiveView:
    """Two lines: a bar of the blocks, and below it the running trial or the thing that the ablation waits for."""

    def __init__(self, followed: FollowedAblation) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("blocks"),
            TimeElapsedColumn(),
        )
        self._task: TaskID = self._progress.add_task("", total=None)
        self._below = Text()
        self.update(followed)

    def __rich__(self) -> RenderableType:
        return Group(self._progress, self._below)

    def update(self, followed: FollowedAblation) -> None:
        """Show the current state of the ablation."""
        row = followed.ablation
        self._progress.update(
            self._task,
            description=f"{escape(row.name)} {row.state}",
            total=row.blocks.planned,
            completed=row.blocks.done + row.blocks.failed,
        )
        self._below = Text(f"  {followed.trial_text}" if followed.trial_text else "", style="dim")
