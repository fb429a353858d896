"""Tables of the CLI: ablations, plans, nodes, gates and verdicts as people read them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from experiments.block_numbers import block_number, place_number
from experiments.design.power import FEWER_BLOCKS
from experiments.outcomes import AblationState, TrialState
from experiments.reporting import wording
from experiments.reporting.terminal.terminal_table import TerminalTable, ids, names, numbers, texts

if TYPE_CHECKING:
    from service.schemas.ablations import AblationPublic, TrialPublic
    from service.schemas.calibrations import CalibrationList
    from service.schemas.nodes import NodePublic, NodeRuns
    from service.schemas.submissions import NodeClassAnswer, PlanPublic

STATES: dict[str, str] = {
    AblationState.COMPLETED: "green",
    TrialState.DONE: "green",
    AblationState.RUNNING: "cyan",
    AblationState.CANCELLING: "yellow",
    AblationState.CANCELLED: "yellow",
    AblationState.FAILED: "red",
}


MOST_BLOCKS = 8
"""Blocks of a plan that are shown."""


def state(name: str) -> str:
    """Return a state in its colour."""
    colour = STATES.get(name)
    return f"[{colour}]{name}[/]" if colour else name


def ablations(rows: "Iterable[AblationPublic]") -> RenderableType:
    """Show a list of ablations."""
    made = TerminalTable(
        *names("name"),
        *ids("id"),
        *names("state"),
        *numbers("blocks"),
        *texts("answer", "waits for"),
        *names("created"),
        leaving=("waits for", "created"),
    )
    for row in rows:
        created = wording.moment(row.created_at)
        answer, waits = escape(row.answer or time_left(row)), escape(row.waiting_for or "")
        made.add_row(escape(row.name), row.id, state(row.state), blocks(row), answer, waits, created)
    return made if made.rows else Text("No ablation yet. Submit one: ablate submit demo")


def blocks(row: "AblationPublic") -> str:
    """Say how many blocks are done and how many failed."""
    failed = f", {row.blocks.failed:,} failed" if row.blocks.failed else ""
    return f"{row.blocks.done:,}/{row.blocks.planned:,}{failed}"


def time_left(row: "AblationPublic") -> str:
    """Say how long an ablation still takes; nothing where nobody knows."""
    return "" if row.time_left_s is None else f"about {wording.duration(row.time_left_s)} left"


RAN = "ran"
"""The state of a trial that ran while its block goes on; for the service it runs until the block is handed in."""


def ablation(row: "AblationPublic", trials: "Sequence[TrialPublic]") -> RenderableType:
    """Show one ablation with its trials."""
    stands = [("answer", row.answer), ("waits for", row.waiting_for), ("time left", time_left(row))]
    known = facts(
        ("ablation", f"[bold]{escape(row.name)}[/]  {row.id}"),
        ("question", escape(row.question)),
        ("state", state(row.state)),
        ("priority", str(row.priority)),
        *((name, escape(said)) for name, said in stands if said),
        ("blocks", blocks(row)),
        ("node class", row.node_class),
        ("spec", row.spec_digest),
        ("rule", row.rule_digest),
        *(("imported from", digest) for digest in row.bundles),
        ("created", wording.moment(row.created_at)),
        ("mlflow", row.mlflow_url or "not projected yet"),
    )
    return Group(known, _trials(trials), Text(f"log of one: ablate log {row.name}/BLOCK/ARM", "dim"))


def _trials(rows: "Sequence[TrialPublic]") -> TerminalTable:
    ran = any(row.node for row in rows)
    made = TerminalTable(
        *names("arm"),
        *numbers("block", "place"),
        *names("state", "outcome", *(["node"] if ran else [])),
        *texts("why"),
        *names("trial"),
        leaving=("why",),
    )
    for row in rows:
        number, place = str(block_number(row.block_index)), str(place_number(row.position))
        made.add_row(
            escape(row.arm),
            number,
            place,
            RAN if row.had_its_turn else state(row.state),
            row.outcome or "",
            *([escape(row.node or "")] if ran else []),
            escape(row.reason or (f"runs again: {row.broke}" if row.broke else "")),
            row.id,
        )
    return made


def facts(*pairs: tuple[str, str]) -> Table:
    """Show facts, each with its name before it."""
    made = Table(show_header=False, box=None, pad_edge=False)
    made.add_column(no_wrap=True, style="dim")
    made.add_column(overflow="fold")
    for pair in pairs:
        made.add_row(*pair)
    return made


def plan(answer: "PlanPublic") -> RenderableType:
    """Show what a spec would run, where, and what it could detect."""
    arms = ", ".join(escape(arm.name) for arm in answer.arms)
    known = facts(
        ("ablation", f"[bold]{escape(answer.ablation)}[/]"),
        ("arms", f"{arms} (the first is the baseline)"),
        ("size", f"{wording.counted(len(answer.blocks), 'block')}, {wording.counted(answer.trials, 'trial')}"),
        ("device minutes", _minutes(answer)),
        ("detects", _detects(answer)),
        *_words(answer),
        *(
            (f"node class {row.node_class}", _eligible(row))
            for row in answer.node_classes
            if row.node_class == answer.node_class
        ),
        ("spec", answer.spec_digest),
        ("rule", answer.rule_digest),
    )
    made = TerminalTable(*numbers("block", "seed"), *texts("order"))
    for block in answer.blocks[:MOST_BLOCKS]:
        made.add_row(str(block_number(block.index)), str(block.seed), escape(" ".join(block.order)))
    left = len(answer.blocks) - MOST_BLOCKS
    more = [Text(f"... {left:,} more (all of them: --json)", "dim")] if left > 0 else []
    return Group(known, made, *more, warnings(answer.warnings))


def warnings(said: Sequence[str]) -> RenderableType:
    """Show what a spec does not get as it stands; nothing where that is nothing."""
    return Group(*(Text(f"warning: {one}", "yellow") for one in said))


def _minutes(answer: "PlanPublic") -> str:
    cost = answer.expected_device_minutes
    return "unknown, nothing of this kind was measured yet" if cost is None else f"about {wording.fixed(cost, 1)}"


def _is_costly(answer: "PlanPublic") -> bool:
    """Tell whether the noise asks for more than the design has, or than its budget allows."""
    found, cost = answer.sizing, answer.expected_device_minutes
    blind = found is not None and found.mde_pct > found.adopt_if_pct
    return blind or (cost is not None and cost > answer.device_minutes_allowed)


def _detects(answer: "PlanPublic") -> str:
    if answer.mde_pct_per_sd_pct is None:
        return "any change: the metric that decides is exact"
    if answer.sizing is not None:
        found = answer.sizing
        needed = (
            "no allowed number of blocks detects"
            if found.blocks_needed is None
            else f"{wording.counted(found.blocks_needed, 'block')} detect"
        )
        seen, noise = wording.size_percent(found.mde_pct), wording.size_percent(found.sd_upper_pct)
        adopt, steps = wording.plain_percent(found.adopt_if_pct), wording.counted(answer.window_steps, "timed step")
        measured = f"sd of at most {noise} between neighbouring trials, over windows of {steps}"
        said = f"{seen} at the measured noise ({measured}); the rule adopts from {adopt}, which {needed}"
        return f"{said}; {FEWER_BLOCKS}" if _is_costly(answer) else said
    return f"{wording.size_percent(answer.mde_pct_per_sd_pct)} for each percent of noise between neighbouring trials"


def _words(answer: "PlanPublic") -> Iterator[tuple[str, str]]:
    """Say that the answer will be inconclusive, where the noise of what would run is not known."""
    if answer.mended_by is not None:
        why = f"no node of class {answer.node_class} is calibrated for this workload"
        yield "words", f"[yellow]none beyond inconclusive[/]: {why}; first: {escape(answer.mended_by)}"


def _eligible(row: "NodeClassAnswer") -> str:
    if row.eligible:
        return f"[green]can run it[/] ({wording.counted(row.live_nodes, 'live node')})"
    return f"[yellow]cannot run it now[/]: {escape(row.reason or 'no reason given')}"


def nodes(rows: "Iterable[NodePublic]") -> RenderableType:
    """Show the registered nodes."""
    made = TerminalTable(
        *names("node", "class", "health"),
        *texts("takes work", "runs", "devices", "lacks"),
        *names("seen"),
        leaving=("lacks", "devices", "seen"),
    )
    for row in rows:
        counts = Counter(device.name for device in row.devices)
        devices = ", ".join(name if count == 1 else f"{count} times {name}" for name, count in counts.items())
        lacks = escape("; ".join([*row.lacks, *_lanes_that_failed(row)]))
        seen = wording.moment(row.seen_at)
        made.add_row(
            escape(row.name),
            row.node_class,
            row.health,
            _takes_work(row),
            escape(", ".join(map(_runs, row.runs))),
            escape(devices),
            lacks,
            seen,
        )
    return made if made.rows else Text("No node has registered. Start one: ablate up, or ablate worker up")


def _runs(one: "NodeRuns") -> str:
    """Write what runs as `ablate log` takes it."""
    return "/".join((one.name, str(block_number(one.block_index)), *one.arms[:1]))


def _takes_work(row: "NodePublic") -> str:
    if row.state == "works":
        return "yes" if row.health == "live" else "[yellow]no, it is silent[/]; start its worker"
    if row.state == "revoked":
        return f"[yellow]no, its key is revoked[/]; ablate nodes add {escape(row.name)}"
    why = f": {escape(row.quarantined_reason)}" if row.quarantined_reason else ""
    return f"[yellow]no, {row.state}[/]{why}; ablate nodes resume {escape(row.name)}"


def _lanes_that_failed(row: "NodePublic") -> list[str]:
    return [f"lane {lane}: {problem}" for lane, problem in (row.lanes or {}).items() if problem is not None]


def calibrations(found: "CalibrationList") -> RenderableType:
    """Show what is known about noise, and the service's own rate of false words."""
    made = TerminalTable(
        *names("calibrated", "recipe"),
        *numbers("A/A blocks", "sd of d", "at most"),
        *texts("admits words"),
        *names("last block"),
        leaving=("last block",),
    )
    for row in found.items:
        one = row.calibration
        sd, most = wording.size_percent(one.sd_pct), wording.size_percent(one.sd_upper_pct)
        state = "yes" if row.problem is None else f"no: {row.problem}; {row.mended_by}"
        device, last = f"{one.key.node_class} {one.key.device_serial}", wording.moment(one.measured_at)
        made.add_row(escape(device), one.key.recipe, f"{one.blocks:,}", sd, most, escape(state), last)
    statement = Text(found.statement)
    return Group(made, statement) if found.items else statement
