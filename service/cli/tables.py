"""Tables of ablations, trials, plans, nodes and calibrations for a terminal."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ablate.experiments.block_numbers import block_number, place_number
from ablate.experiments.design.power import FEWER_BLOCKS
from ablate.experiments.outcomes import AblationState, SeedOrigin, TrialState
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.terminal.terminal_table import TerminalTable, ids, names, numbers, texts
from ablate.experiments.system.logs import WARNING, style_of

if TYPE_CHECKING:
    from ablate.service.schemas.ablations import AblationPublic, TrialPublic
    from ablate.service.schemas.nodes import CalibrationList, NodePublic, NodeRuns, WaitingPublic
    from ablate.service.schemas.sessions import SessionPath, SessionPublic
    from ablate.service.schemas.submissions import AblationAccepted, NodeClassAnswer, PlanPublic
    from ablate.service.schemas.tokens import TokenPublic

_STATE_COLOURS: dict[str, str] = {
    AblationState.COMPLETED: "green",
    TrialState.DONE: "green",
    AblationState.RUNNING: "cyan",
    AblationState.CANCELLING: "yellow",
    AblationState.CANCELLED: "yellow",
    AblationState.FAILED: "red",
}
_PLAN_BLOCKS = 8
_NAMED_EARLIER = 3
"""Earlier askings that a plan names."""
"""Blocks of a plan in its table."""
_RAN = "ran"
"""State of a trial that ran while its block goes on. The service shows it as running until the block is reported."""


def state(name: str) -> str:
    """Return a state as markup in its colour."""
    colour = _STATE_COLOURS.get(name)
    return f"[{colour}]{name}[/]" if colour else name


def ablations(rows: "Iterable[AblationPublic]") -> RenderableType:
    """Return a table of ablations."""
    table = TerminalTable(
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
        table.add_row(escape(row.name), row.id, state(row.state), blocks(row), answer, waits, created)
    return table if table.rows else Text("No ablation yet. Submit one: ablate run demo")


def blocks(row: "AblationPublic") -> str:
    """Return the number of blocks that are done, planned and failed."""
    failed = f", {row.blocks.failed:,} failed" if row.blocks.failed else ""
    return f"{row.blocks.done:,}/{row.blocks.planned:,}{failed}"


def time_left(row: "AblationPublic") -> str:
    """Return the time that an ablation still takes; empty if unknown."""
    return "" if row.time_left_s is None else f"about {wording.duration(row.time_left_s)} left"


def ablation(row: "AblationPublic", trials: "Sequence[TrialPublic]", *, rest: int | None = None) -> RenderableType:
    """Return one ablation with some of its trials; `rest` is the number of the block where the others begin."""
    progress = [("answer", row.answer), ("waits for", row.waiting_for), ("time left", time_left(row))]
    pairs = facts(
        ("ablation", f"[bold]{escape(row.name)}[/]  {row.id}"),
        ("question", escape(row.question)),
        ("state", state(row.state)),
        ("priority", str(row.priority)),
        *((name, escape(text)) for name, text in progress if text),
        ("blocks", blocks(row)),
        ("node class", row.node_class),
        ("spec", row.spec_digest),
        ("rule", row.rule_digest),
        *(("imported from", digest) for digest in row.bundles),
        ("created", wording.moment(row.created_at)),
        ("mlflow", row.mlflow_url or "not in MLflow yet"),
    )
    last = [Text(f"log of a trial: ablate log {row.name}/BLOCK/ARM", "dim")]
    if rest is not None:
        last.insert(0, Text(f"more trials: ablate show {row.name} --from-block {rest}    (all of them: --json)", "dim"))
    return Group(pairs, _trials(trials), *last)


def _trials(rows: "Sequence[TrialPublic]") -> TerminalTable:
    node = ["node"] if any(row.node for row in rows) else []
    table = TerminalTable(
        *names("arm"),
        *numbers("block", "place"),
        *names("state", "outcome", *node),
        *texts("why"),
        *names("trial"),
        leaving=("why",),
    )
    for row in rows:
        number, place = str(block_number(row.block_index)), str(place_number(row.position))
        table.add_row(
            escape(row.arm),
            number,
            place,
            _RAN if row.had_its_turn else state(row.state),
            row.outcome or "",
            *([escape(row.node or "")] if node else []),
            escape(row.reason or (f"runs again: {row.broke}" if row.broke else "")),
            row.id,
        )
    return table


def facts(*pairs: tuple[str, str]) -> Table:
    """Return a table of (name, value)."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for pair in pairs:
        table.add_row(*pair)
    return table


def _seeds(answer: "PlanPublic") -> str:
    if answer.seeds is SeedOrigin.TO_BE_DRAWN:
        return "drawn at the submission, and shown when a node claims their block"
    return "chosen in the spec: the verdict says so"


def plan(answer: "PlanPublic") -> RenderableType:
    """Return the trials of a spec, the nodes that can run them, and the effect that it can detect."""
    arms = ", ".join(escape(arm.name) for arm in answer.arms)
    pairs = facts(
        ("ablation", f"[bold]{escape(answer.ablation)}[/]"),
        ("arms", f"{arms} (the first is the baseline)"),
        ("size", f"{wording.counted(len(answer.blocks), 'block')}, {wording.counted(answer.trials, 'trial')}"),
        ("seeds", _seeds(answer)),
        ("device minutes", _device_minutes(answer)),
        *_asking(answer),
        ("detects", _detects(answer)),
        *_verdict_limits(answer),
        *(
            (f"node class {row.node_class}", _eligible(row))
            for row in answer.node_classes
            if row.node_class == answer.node_class
        ),
        ("spec", answer.spec_digest),
        ("rule", answer.rule_digest),
    )
    table = TerminalTable(*numbers("block", "seed"), *texts("order"))
    for block in answer.blocks[:_PLAN_BLOCKS]:
        seed = "drawn" if block.seed is None else str(block.seed)
        table.add_row(str(block_number(block.index)), seed, escape(" ".join(block.order)))
    left = len(answer.blocks) - _PLAN_BLOCKS
    more = [Text(f"... {left:,} more (all of them: --json)", "dim")] if left > 0 else []
    return Group(pairs, table, *more, warnings(answer.warnings))


def warnings(texts: Sequence[str]) -> RenderableType:
    """Return the warnings about a spec, one per line."""
    return Group(*(Text(f"{WARNING}{text}", style_of(WARNING)) for text in texts))


def remarks(answer: "AblationAccepted") -> RenderableType:
    """Return what the service added to a submission, and its warnings."""
    own = []
    if answer.plan.control is not None:
        more = wording.counted(answer.plan.blocks, "trial")
        own.append(Text(f"arm '{answer.plan.control}' repeats the baseline, to measure the noise: {more} more"))
    return Group(*own, warnings(answer.warnings))


def _device_minutes(answer: "PlanPublic") -> str:
    cost, sizing = answer.expected_device_minutes, answer.sizing
    most = "unknown: no similar ablation has run yet" if cost is None else f"about {wording.fixed(cost, 1)}"
    if sizing is None or not sizing.expected:
        return most
    means = (
        f"{_blocks_and_minutes(one.blocks, answer)} for a change of {one.change_pct:g} %" for one in sizing.expected
    )
    return f"{'' if cost is None else 'at most '}{most}; expected: {', '.join(means)}"


def _blocks_and_minutes(blocks: float, answer: "PlanPublic") -> str:
    cost = answer.expected_device_minutes
    if cost is None:
        return f"{wording.fixed(blocks, 0)} blocks"
    return f"{wording.fixed(cost * blocks / len(answer.blocks), 1)} ({wording.fixed(blocks, 0)} blocks)"


def _is_costly(answer: "PlanPublic") -> bool:
    """Return whether the noise needs more blocks than the design has, or more time than its budget."""
    sizing, cost = answer.sizing, answer.expected_device_minutes
    too_few = sizing is not None and sizing.proved_pct > sizing.aim_pct
    return too_few or (cost is not None and cost > answer.device_minutes_allowed)


def _detects(answer: "PlanPublic") -> str:
    sizing, per_sd = answer.sizing, answer.mde_pct_per_sd_pct
    if per_sd is not None and answer.asking is not None:
        per_sd = answer.asking.mde_pct_per_sd_pct
    if sizing is None and answer.over_seeds:
        return "unknown: no earlier ablation of this baseline shows how far the losses of seeds are apart"
    if sizing is None:
        if per_sd is None:
            return "any change: the metric that decides is exact"
        if answer.repeats:
            return "depends on the seeds: the metric that decides repeats bit for bit, so only another seed changes it"
        example = f"if neighbouring trials scatter by 1 %, effects from {wording.size_percent(per_sd)} on"
        return f"depends on the noise, which nobody measured for this workload: {example}"
    unit = "block" if sizing.baseline is None else "seed"
    enough = (
        f"no allowed number of {unit}s proves"
        if sizing.blocks_needed is None
        else f"{wording.counted(sizing.blocks_needed, unit)} prove"
    )
    noise = (
        f"sd of at most {wording.size_percent(sizing.sd_upper_pct)} between neighbouring trials, "
        f"over windows of {wording.counted(answer.window_steps, 'timed step')}"
    )
    if sizing.baseline is not None:
        noise = (
            f"sd of at most {wording.size_percent(sizing.sd_upper_pct)} between seeds in '{sizing.earlier}', whose "
            f"baseline had {sizing.baseline:.4g}; another variant may scatter differently"
        )
    text = (
        f"{wording.size_percent(sizing.mde_pct)} at the measured noise ({noise}); a true gain of "
        f"{wording.size_percent(sizing.adopted_pct)} is adopted in 80 % of cases; {enough} a gain of "
        f"{wording.plain_percent(sizing.aim_pct)} to be beyond the margin"
    )
    return f"{text}; {FEWER_BLOCKS}" if _is_costly(answer) else text


def _asking(answer: "PlanPublic") -> Iterator[tuple[str, str]]:
    """Yield the number of this asking, and what asking again would cost."""
    asking = answer.asking
    if asking is None:
        return
    after = f" (after {wording.listed([repr(name) for name in asking.earlier[-_NAMED_EARLIER:]])})"
    first = "the first of this question" if asking.number == 1 else f"number {asking.number} of this question{after}"
    level, later = (wording.plain_percent(one) for one in (asking.level_pct, asking.next_level_pct))
    price = f"detects effects from {asking.next_mde_factor:.2f} times the size on"
    yield "asking", f"{escape(first)}, tested at {level}; asking again is tested at {later} and {price}"


def _verdict_limits(answer: "PlanPublic") -> Iterator[tuple[str, str]]:
    """Yield what the verdict rests on if the noise of this workload is unknown."""
    if answer.mended_by is None:
        return
    reason = f"no node of class {answer.node_class} is calibrated for this workload"
    if answer.control is None:
        yield "verdict", f"[yellow]inconclusive[/], uncalibrated: {reason}; to calibrate: {escape(answer.mended_by)}"
        return
    own = f"arm '{escape(answer.control)}' repeats the baseline to measure the noise"
    yield "verdict", f"by its own noise: {reason}, so {own}; narrower intervals after: {escape(answer.mended_by)}"


def _eligible(row: "NodeClassAnswer") -> str:
    if row.eligible:
        return f"[green]can run it[/] ({wording.counted(row.live_nodes, 'live node')})"
    return f"[yellow]cannot run it now[/]: {escape(row.reason or 'no reason given')}"


def nodes(rows: "Iterable[NodePublic]") -> RenderableType:
    """Return a table of nodes."""
    table = TerminalTable(
        *names("node", "class", "health"),
        *texts("takes work", "runs", "devices", "lacks"),
        *names("seen"),
        leaving=("lacks", "devices", "seen"),
    )
    for row in rows:
        counts = Counter(device.name for device in row.devices)
        devices = ", ".join(name if count == 1 else f"{count} times {name}" for name, count in counts.items())
        if len(row.devices) > 1:
            devices += f"; {row.devices_free} free"
        if row.cores is not None:
            devices += f"; {wording.counted(row.cores, 'core')}"
        lacks = escape("; ".join([*row.lacks, *_lanes_that_failed(row)]))
        seen = wording.moment(row.seen_at)
        table.add_row(
            escape(row.name),
            row.node_class,
            row.health,
            _takes_work(row),
            escape(", ".join(map(_trial_place, row.runs))),
            escape(devices),
            lacks,
            seen,
        )
    return table if table.rows else Text("No node has registered. Start one: ablate up, or ablate worker up")


def enrolments(rows: "Iterable[TokenPublic]") -> RenderableType:
    """Return a table of enrolment tokens."""
    table = TerminalTable(*names("name", "class", "uses left"), *texts("valid", "created"))
    for row in rows:
        ends = next((secret.ends_at for secret in row.secrets), None)
        state = "expired" if ends is None else "used up" if not row.uses_left else f"until {wording.moment(ends)}"
        if row.revoked_at is not None:
            state = f"revoked {wording.moment(row.revoked_at)}: {row.reason}"
        made = f"{wording.moment(row.created_at)} by {row.created_by}"
        table.add_row(escape(row.name), row.node_class or "", str(row.uses_left), escape(state), escape(made))
    return table if table.rows else Text("There is no enrolment token. Make one: ablate nodes enrol CLASS")


def waiting(rows: "Iterable[WaitingPublic]") -> RenderableType:
    """Return a line for each kind of work that waits."""
    lines = (
        f"{wording.fixed(row.device_minutes, 1)} device minutes wait for class {row.node_class}, "
        f"{wording.counted(row.devices, 'device')}{'' if row.nodes_each == 1 else f' of {row.nodes_each} nodes'}: "
        f"{wording.counted(row.blocks, 'block')}, "
        f"{wording.counted(row.nodes, 'node')} may run them"
        for row in rows
    )
    return Group(*map(Text, lines))


def _trial_place(runs: "NodeRuns") -> str:
    """Return the running trial in the form that `ablate log` accepts."""
    return "/".join((runs.name, str(block_number(runs.block_index)), *runs.arms[:1]))


def _takes_work(row: "NodePublic") -> str:
    if row.state == "works":
        return "yes" if row.health == "live" else "[yellow]no, it is silent[/]; start its worker"
    if row.state == "revoked":
        return f"[yellow]no, its key is revoked[/]; ablate nodes add {escape(row.name)}"
    why = f": {escape(row.quarantined_reason)}" if row.quarantined_reason else ""
    return f"[yellow]no, {row.state}[/]{why}; {_probes(row)}ablate nodes resume {escape(row.name)}"


def _probes(row: "NodePublic") -> str:
    """Say when a quarantined node probes itself, with the end of a clause; empty if a person has to act."""
    if row.probe_began_at is not None:
        return f"it probes itself since {wording.moment(row.probe_began_at)}, and works again if that passes; or "
    return f"it probes itself again, {wording.moment(row.probe_at)}; or " if row.probe_at is not None else ""


def _lanes_that_failed(row: "NodePublic") -> list[str]:
    failed = ((name, problem) for name, problem in (row.lanes or {}).items() if problem is not None)
    return [f"{name}: {problem}" if "=" in name else f"lane {name}: {problem}" for name, problem in failed]


def calibrations(answer: "CalibrationList") -> RenderableType:
    """Return the noise of devices, and the service's rate of false verdicts."""
    table = TerminalTable(
        *names("device", "recipe", "metric"),
        *numbers("A/A blocks", "sd of d", "at most"),
        *texts("calibrated"),
        *names("last block"),
        leaving=("last block",),
    )
    for row in answer.items:
        calibration, key = row.calibration, row.calibration.key
        calibrated = "yes" if row.problem is None else f"no: {row.problem}; {row.mended_by}"
        table.add_row(
            escape(f"{key.node_class} {key.device_serial}"),
            key.recipe,
            wording.metric(calibration.metric),
            f"{calibration.blocks:,}",
            wording.size_percent(calibration.sd_pct),
            wording.size_percent(calibration.sd_upper_pct),
            escape(calibrated),
            wording.moment(calibration.measured_at),
        )
    statement = Text(answer.statement)
    return Group(table, statement) if answer.items else statement


def sessions(rows: "Iterable[SessionPublic]") -> RenderableType:
    """Return a table of sessions."""
    table = TerminalTable(*names("session", "state"), *numbers("proposals", "kept"), *texts("next level", "metric"),
                          *names("node class", "opened by", "opened"), leaving=("opened by", "opened"))  # fmt: skip
    for one in rows:
        level = f"{100 * one.next_level:.2g} %"
        opened = wording.moment(one.created_at)
        counts = (f"{one.proposals:,}", f"{one.kept:,}")
        table.add_row(escape(one.name), one.state, *counts, level, one.metric, one.node_class, one.opened_by, opened)
    return table if table.rows else "No session yet. Open one: ablate sessions open NAME SPEC"


def incumbent(path: "SessionPath") -> str:
    """Name the incumbent of a session."""
    return f"proposal {path.incumbent}" if path.incumbent else "the baseline that opened it"


def session(path: "SessionPath") -> RenderableType:
    """Return one session with its proposals."""
    pairs = facts(
        ("session", f"[bold]{escape(path.name)}[/], {path.state}, opened by {escape(path.opened_by)}"),
        ("decides", f"{path.metric} on node class {path.node_class}"),
        ("incumbent", f"{incumbent(path)}; its spec: ablate sessions spec {escape(path.name)}"),
        ("kept", f"{path.kept:,} of {wording.counted(path.proposals, 'proposal')}"),
        ("next level", f"{100 * path.next_level:.2g} %"),
        *([("advice", f"[yellow]{escape(path.advice)}[/]")] if path.advice else []),
    )
    table = TerminalTable(*numbers("proposal"), *names("outcome"), *numbers("level"), *texts("answer", "change"),
                          *names("name"), *ids("ablation"), leaving=("ablation", "name"))  # fmt: skip
    for one in path.path:
        level = f"{100 * one.level:.2g} %"
        outcome, answer, change = one.outcome or f"({one.state})", one.answer or "", one.note or one.change
        table.add_row(str(one.number), str(outcome), level, escape(answer), escape(change), escape(one.name),
                      one.ablation_id)  # fmt: skip
    return Group(pairs, table) if path.path else Group(pairs)
