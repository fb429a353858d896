"""Follow an ablation: live with rich on a terminal, line by line elsewhere. Leaving never cancels anything."""

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from experiments.block_numbers import block_name
from experiments.outcomes import BlockState, TrialState
from experiments.reporting import wording
from service.cli import show
from service.cli.output import print_json_line
from service.client.api import Client
from service.lifecycle import OVER, EventKind
from service.schemas.ablations import AblationPublic, TrialPublic
from service.schemas.events import Event
from service.schemas.nodes import NodePublic

_LOOK_EVERY_S = 0.5
_REFRESH_S = 2.0
"""How often the queue position is asked for while nothing happens."""
_LINE_EVERY_S = 10.0
"""How often a running trial gets a line when the output is no terminal."""


@dataclass
class FollowedAblation:
    """What is known about a followed ablation."""

    ablation: AblationPublic
    trials: dict[str, TrialPublic]
    names: dict[str, str]
    """Block ids to what people call them: "block 2/6"."""
    nodes: dict[str, str] = field(default_factory=dict)
    """Names of nodes by id."""
    current: TrialPublic | None = None
    steps: str = ""
    holders: dict[str, str] = field(default_factory=dict)
    """Ids of the nodes that run blocks, or ran them last, by block id."""
    lines: list[str] = field(default_factory=list)
    """What happened since the last look, for line output."""

    @classmethod
    def of(
        cls, ablation: AblationPublic, trials: Iterable[TrialPublic], nodes: Iterable[NodePublic] = ()
    ) -> "FollowedAblation":
        """Begin with what the service says now."""
        by_id = {trial.id: trial for trial in trials}
        names = {trial.block_id: block_name(trial.block_index, ablation.blocks.planned) for trial in by_id.values()}
        return cls(ablation=ablation, trials=by_id, names=names, nodes={node.id: node.name for node in nodes})

    def apply(self, event: Event) -> None:
        """Take in one event."""
        trial = self.trials.get(event.subject or "")
        if event.kind == EventKind.TRIAL_PROGRESS and trial is not None:
            self.current, self.steps = trial, steps_text(event)
        elif event.kind == EventKind.TRIAL_STATE and trial is not None and event.went_to == TrialState.RUNNING:
            self.current, self.steps = trial, ""
        elif event.kind in (EventKind.BLOCK_STATE, EventKind.ABLATION_STATE):
            self._tell(event)

    def _tell(self, event: Event) -> None:
        block = event.subject or ""
        if event.kind == EventKind.BLOCK_STATE and event.went_to == BlockState.RUNNING and event.actor:
            self.holders[block] = event.actor
        if self._ends_what_runs(event):
            self.current, self.steps = None, ""
        name = self.names.get(block, self.ablation.name)
        self.lines.append(history_line(event, f"{name}{self._on_node(block)}"))

    def _ends_what_runs(self, event: Event) -> bool:
        """Say whether the block of the trial that runs goes on no more: it is over, or back in the queue."""
        own = self.current is not None and event.subject == self.current.block_id
        return own and event.kind == EventKind.BLOCK_STATE and event.went_to != BlockState.RUNNING

    def _on_node(self, block: str) -> str:
        """Say where a block runs, as soon as that is known: " on gpu-7"."""
        name = self.nodes.get(self.holders.get(block, ""))
        return f" on {name}" if name else ""

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self.ablation.state in OVER

    @property
    def trial_text(self) -> str:
        """Say which arm runs and how far it is."""
        if self.ablation.waiting_for:
            return f"waits for {self.ablation.waiting_for}{self._left}"
        if self.current is None or self.over:
            return ""
        block = self.current.block_id
        return f"{self.names[block]}{self._on_node(block)}, {self.current.arm}: {self.steps or 'starting'}{self._left}"

    @property
    def _left(self) -> str:
        left = show.time_left(self.ablation)
        return left and f"; {left}"


def steps_text(event: Event) -> str:
    """Write a progress event: steps, tokens per second, loss."""
    values = event.data or {}
    parts = [f"step {values.get('steps_done') or 0}/{values.get('steps_total') or '?'}"]
    if values.get("tokens_per_s") is not None:
        parts.append(f"{wording.number(values['tokens_per_s'])} tokens/s")
    if values.get("loss") is not None:
        parts.append(f"loss {wording.fixed(values['loss'], 3)}")
    return ", ".join(parts)


def history_line(event: Event, name: str) -> str:
    """Write a change of state of what people call `name` as one line, with the UTC time of day."""
    reason = f" ({event.reason})" if event.reason else ""
    return f"{event.at[11:19]}  {name}: {event.went_to}{reason}"


def follow(client: Client, ablation_id: str, console: Console) -> AblationPublic:
    """Show an ablation until it is over; return its last state. KeyboardInterrupt passes through."""
    row, trials = client.ablations.get(ablation_id), client.ablations.trials(ablation_id)
    followed = FollowedAblation.of(row, trials, client.nodes())
    view = _LiveView(followed) if console.is_terminal else None
    if view is None:
        _follow_in_lines(client, followed, console)
    else:
        with Live(view, console=console, refresh_per_second=4):
            for _ in _looks(client, followed):
                view.update(followed)
    return followed.ablation


def follow_as_json(client: Client, ablation_id: str) -> AblationPublic:
    """Print every event as a line of JSON; return the last state."""
    for event in client.ablations.watch(ablation_id):
        print_json_line(event=event)
    return client.ablations.get(ablation_id)


def _follow_in_lines(client: Client, followed: FollowedAblation, console: Console) -> None:
    said, said_at = "", 0.0
    for _ in _looks(client, followed):
        for line in followed.lines:
            console.print(escape(line))
        followed.lines.clear()
        text = followed.trial_text
        if text and text != said and time.monotonic() - said_at >= _LINE_EVERY_S:
            console.print(escape(f"{datetime.now(UTC):%H:%M:%S}  {text}"))
            said, said_at = text, time.monotonic()


def _looks(client: Client, followed: FollowedAblation) -> Iterator[None]:
    """Keep `followed` up to date; yield after every change and at least every half second."""
    feed: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(client, followed.ablation.id, feed), daemon=True).start()
    asked_at, ended = time.monotonic(), False
    while not ended:
        changed = False
        for item in _waiting(feed):
            if isinstance(item, Exception):
                raise item
            followed.apply(item)
            changed = changed or item.kind != EventKind.TRIAL_PROGRESS
            ended = ended or item.kind == EventKind.END
        if changed or time.monotonic() - asked_at > _REFRESH_S:
            followed.ablation = client.ablations.get(followed.ablation.id)
            if not followed.nodes.keys() >= set(followed.holders.values()):  # one that registered meanwhile
                followed.nodes = {node.id: node.name for node in client.nodes()}
            asked_at = time.monotonic()
        yield


def _waiting(feed: "queue.SimpleQueue[Event | Exception]") -> Iterator[Event | Exception]:
    try:
        yield feed.get(timeout=_LOOK_EVERY_S)
        while True:
            yield feed.get_nowait()
    except queue.Empty:
        return


def _read(client: Client, ablation_id: str, feed: "queue.SimpleQueue[Event | Exception]") -> None:
    try:
        for event in client.ablations.watch(ablation_id):
            feed.put(event)
    except Exception as error:  # the thread's boundary: whoever follows gets it raised
        feed.put(error)


class _LiveView:
    """Two lines: the blocks as a bar, and below it the running trial or what the ablation waits for."""

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
        """Show the ablation as it is now."""
        row = followed.ablation
        self._progress.update(
            self._task,
            description=f"{escape(row.name)} {row.state}",
            total=row.blocks.planned,
            completed=row.blocks.done + row.blocks.failed,
        )
        self._below = Text(f"  {followed.trial_text}" if followed.trial_text else "", style="dim")
