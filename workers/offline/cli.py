"""`ablate offline exec`: run a plan file on an air-gapped node, into a bundle.

`ablate offline exec` starts `python -m ablate.workers.offline`, whose main module trials do not import again.
"""

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ablate.experiments.block_numbers import block_index, block_list
from ablate.experiments.design.plan import Plan
from ablate.experiments.digest import code_digest
from ablate.experiments.errors import ExperimentError, SigningUnavailable
from ablate.experiments.ids import node_name_problem, own_node_name
from ablate.experiments.outcomes import ExitCode
from ablate.experiments.records.bundle import Bundle
from ablate.experiments.records.bundle_files import read_bundle_files, write_tar
from ablate.experiments.records.circumstances import NOT_REGISTERED
from ablate.experiments.records.plan_file import PlanFile, PlanWithCode, carried_plan, differences
from ablate.experiments.records.signing import Signer
from ablate.experiments.system.processes import OWN_PYTHON
from ablate.kernels.backends import Lane
from ablate.workers.blocks.block_runner import BlockRunner, NodeContext
from ablate.workers.blocks.code_cache import CodeCache, CodeSource
from ablate.workers.devices.device_lock import DeviceLock
from ablate.workers.devices.inventory import only_when_asked
from ablate.workers.environment_variables import (
    python_environments,
    quiet_s,
    secrets_file,
    state_folder,
    trial_disk_bytes,
    trial_processes,
)
from ablate.workers.errors import ExecRefused, WorkerError
from ablate.workers.isolation.node_secrets import lacks_secret, read_secrets
from ablate.workers.node import KEY_FILE, Node, find_node, node_signer
from ablate.workers.offline.bundle_folder import BundleFolder
from ablate.workers.offline.check import check
from ablate.workers.offline.progress import ProgressDisplay
from ablate.workers.offline.run import ExecRun, ExecSummary
from ablate.workers.paths import MOST_OUTPUT, MOST_PROCESSES, Usage
from ablate.workers.processes.lanes import keep_lanes, run_lanes, stored_lanes, tried_on
from ablate.workers.processes.runner import start_processes
from ablate.workers.processes.wake_event import StopFlag, WakeEvent

check_app = typer.Typer()
check_app.command("check", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(check)
offline_app = typer.Typer()
"""A part of `ablate offline`."""

_GRACE_S = 5.0
_QUIET_S = 60.0
"""Longest wait for quiet cores before a block whose times decide."""


@offline_app.command(
    "exec", context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False
)
def start(context: typer.Context) -> None:
    """Run a plan file on this node, without a service, into a bundle for `ablate offline import`."""
    os.execv(sys.executable, [*OWN_PYTHON, "-m", "ablate.workers.offline", *context.args])  # noqa: S606


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The arguments of the command."""

    plan_file: PlanFile
    code: CodeSource
    """Source of the code that the plan carries."""
    folder: BundleFolder
    wanted: tuple[int, ...]
    data_dir: Path
    rehearse: bool
    signer: Signer | None
    key: Path
    secrets: Path | None
    """File with the secrets of programs."""
    quiet_s: float
    """Longest wait for quiet cores."""
    most_output: Usage
    """What the files of a running trial may use."""


def run(  # noqa: PLR0913, PLR0917 - a command's options are its function's arguments
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan that `ablate plan SPEC --out` wrote.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the bundle.")],
    blocks: Annotated[str, typer.Option(help="Only these blocks, counted from 1: 1-3 or 1,4,6. Default: all.")] = "",
    rehearse: Annotated[bool, typer.Option(help="First try every back end and a step of every arm.")] = True,
    data_dir: Annotated[Path | None, typer.Option(help="Prepared data sets. Default: below OUT.")] = None,
    key: Annotated[
        Path | None,
        typer.Option(help="Private key of this node, created if missing. Default: keys/node in ABLATE_HOME."),
    ] = None,
    node_name: Annotated[str, typer.Option(help="Name of this machine. Default: its host name.")] = "",
    tar: Annotated[bool, typer.Option("--tar", help="Write the bundle as OUT.tar, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run a plan file on this node, without a service, into a bundle for `ablate offline import`.

    Finished blocks are kept: the same command continues where the last run ended, even if it was killed. Exit code: 0
    when every requested block is in the bundle, 6 when some are missing, 5 when nothing could run.
    """
    logging.basicConfig(level=logging.ERROR, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    console = Console(stderr=True, soft_wrap=not sys.stderr.isatty(), highlight=False)
    try:
        planned = PlanWithCode(plan)
        plan_file = planned.plan_file
        key_file = (key or state_folder() / KEY_FILE).absolute()
        signer = _signer(key_file, console)
        job = _Job(
            plan_file=plan_file,
            code=lambda _attempt_id, digest: planned.code(digest),
            folder=BundleFolder(out.absolute(), plan_file, signer),
            wanted=parse_numbers(blocks, len(plan_file.plan.blocks)),
            data_dir=(data_dir or out / "work" / "data").absolute(),
            rehearse=rehearse,
            signer=signer,
            key=key_file,
            secrets=secrets_file(),
            quiet_s=_longest_wait_s(),
            most_output=_most_output(),
        )
        wanted = plan_file.plan.node_class
        name = node_name or own_node_name()
        if (problem := node_name_problem(name)) is not None:
            raise ExecRefused(problem)
        node = find_node(name, wanted if only_when_asked(wanted) else None)
        summary, digest = _perform(job, node, console)
        if tar:
            write_tar(read_bundle_files(job.folder.root), out.absolute().with_name(out.name + ".tar"))
    except (ExperimentError, WorkerError, OSError) as error:
        console.print(f"[bold red]refused:[/] {escape(str(error))}")
        raise typer.Exit(ExitCode.ERROR) from error
    _conclude(job, summary, digest, console=console, as_json=as_json)
    if set(job.wanted) - set(summary.done):
        raise typer.Exit(ExitCode.UNMET)


def _signer(path: Path, console: Console) -> Signer | None:
    """Return this node's signer, None where the library is missing; print which."""
    try:
        signer = node_signer(path)
    except SigningUnavailable as error:
        console.print(f"[bold yellow]UNSIGNED:[/] the bundle is not signed: {escape(str(error))}")
        console.print("          anybody with access to the bundle could have written it; import it with --unsigned")
        return None
    console.print(f"the bundle is signed with {signer.key} ({escape(str(path))})")
    return signer


def _perform(job: _Job, node: Node, console: Console) -> tuple[ExecSummary, str]:
    """Check the plan, run it and seal the bundle; return the summary and the bundle's digest."""
    plan_file, folder = job.plan_file, job.folder
    console.print(node.table())
    secret_values = read_secrets(job.secrets) if job.secrets else {}
    reasons = list(refusals(plan_file, node, secret_values))
    if reasons:
        raise ExecRefused("; ".join(reasons))
    for sentence in remarks(plan_file, node):
        console.print(f"[yellow]note[/]  {escape(sentence)}")
    with folder:
        summary = _fill(job, node, folder.open(), secret_values, console=console)
        digest = folder.seal().digest
        if len(summary.done) == len(plan_file.plan.blocks):
            folder.drop_work()
    return summary, digest


def _fill(job: _Job, node: Node, bundle: Bundle, secret_values: Mapping[str, str], *, console: Console) -> ExecSummary:
    """Run the requested blocks that are not in the bundle yet."""
    node_id = job.folder.add_node(node.name, node.registration(job.signer.key if job.signer else None), bundle)
    done = [block.attempt.index for block in bundle.blocks]
    if done:
        console.print(f"blocks in the bundle already, verified and kept: {block_list(done)}")
    missing = [index for index in job.wanted if index not in done]
    if not missing:
        return ExecSummary(done=tuple(done), failed=(), stopped=None)
    plan = job.plan_file.plan
    display = ProgressDisplay(console, name=plan.ablation, blocks=len(missing), trials_per_block=len(plan.arms))
    with _context(job, node, node_id, secret_values) as (context, stopping):
        runner = BlockRunner(context, on_receipt=display.measured)
        execution = ExecRun(job.plan_file, job.folder, runner, display, node_id=node_id)
        with display.shown():
            if job.rehearse and not any(block.attempt.node_id == node_id for block in bundle.blocks):
                try_back_ends(plan, context, display.print_line)
                execution.rehearse(missing[0])
            return execution.run(missing, bundle, stopping=stopping)


def try_back_ends(plan: Plan, context: NodeContext, say: Callable[[str], None]) -> None:
    """Run the small problem of every lane and back end that an arm of `plan` needs, unless it worked here before.

    Lane reference is the definition that the others are compared with, and is not tried. Raises ExecRefused with the
    reason of each that does not compute correct results.
    """
    node, home = context.node, state_folder()
    needed = {name for arm in plan.arms for name in (arm.config.lane(), *arm.config.back_ends())}
    works = stored_lanes(node, home)
    untried = sorted(needed.intersection(tried_on(node.node_class)) - works - {str(Lane.REFERENCE)})
    if not untried:
        return
    say(f"trying {', '.join(untried)} with a small problem each")
    results = run_lanes(node, context.runner.server, data_dir=context.data_dir, works=works, only=untried) or {}
    try:
        keep_lanes(node, {**dict.fromkeys(sorted(works)), **results}, home)
    except OSError as error:
        say(f"cannot store these results, so the next run tries again: {error}")
    problems = [f"{name}: {problem}" for name, problem in results.items() if problem is not None]
    if problems:
        raise ExecRefused("; ".join(problems))


@contextmanager
def _context(
    job: _Job, node: Node, node_id: str, secret_values: Mapping[str, str]
) -> Iterator[tuple[NodeContext, StopFlag]]:
    """Start the processes that trials need; leaving the context ends them."""
    wake_event = WakeEvent()
    stopping = StopFlag(wake_event)
    stopping.install()
    proof = node.devices.proof()
    problem = proof.problem()
    if problem is not None:
        raise ExecRefused(f"this node must be repaired first: {problem}")
    with (
        DeviceLock(node.devices.locks("worker")),
        start_processes(wake_event, grace_s=_GRACE_S, stopping=stopping, most_output=job.most_output) as runner,
    ):
        context = NodeContext(
            node=node,
            node_id=node_id,
            runner=runner,
            paths=job.folder.paths,
            data_dir=job.data_dir,
            proof=proof,
            secret_values=secret_values,
            secrets=(state_folder(), job.folder.root, job.key, *([job.secrets] if job.secrets else [])),
            code_cache=CodeCache(job.data_dir, job.code),
            environments=python_environments(),
            quiet_s=job.quiet_s,
        )
        yield context, stopping


def _longest_wait_s() -> float:
    try:
        return quiet_s(_QUIET_S)
    except ValueError as error:
        raise ExecRefused(str(error)) from error


def _most_output() -> Usage:
    try:
        return dataclasses.replace(
            MOST_OUTPUT, bytes=trial_disk_bytes(MOST_OUTPUT.bytes), processes=trial_processes(MOST_PROCESSES)
        )
    except ValueError as error:
        raise ExecRefused(str(error)) from error


def _conclude(job: _Job, summary: ExecSummary, digest: str, *, console: Console, as_json: bool) -> None:
    total = len(job.plan_file.plan.blocks)
    missing = [index for index in range(total) if index not in summary.done]
    if summary.stopped:
        console.print(f"[yellow]stopped:[/] {escape(summary.stopped)}")
    if summary.failed:
        console.print(f"[red]blocks that used up their attempts:[/] {block_list(summary.failed)}")
    if as_json:
        document = {
            "bundle": str(job.folder.root),
            "digest": digest,
            "key": job.signer.key if job.signer else None,
            "ablation": job.plan_file.ablation_id,
            "blocks_planned": total,
            "block_indices_done": list(summary.done),
            "block_indices_failed": list(summary.failed),
            "block_indices_missing": missing,
            "stopped": summary.stopped,
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    out = Console(soft_wrap=True, highlight=False)
    rest = f"; missing: {block_list(missing)}" if missing else ""
    out.print(f"{len(summary.done)} of {total} blocks are in {escape(str(job.folder.root))}{rest}")
    out.print(f"  bundle   {digest}")
    out.print(f"  signed   {job.signer.key if job.signer else 'by nobody: package cryptography is missing'}")
    if missing:
        out.print("  go on    run the same command again")
    out.print(f"  answer   ablate verdict {escape(job.folder.root.name)}    (where Ablate is installed whole)")
    trust = f"--trust {job.signer.key}" if job.signer else "--unsigned"
    out.print(f"  import   ablate offline import {escape(job.folder.root.name)} {trust}")


def refusals(plan_file: PlanFile, node: Node, secrets: Collection[str] = ()) -> Iterator[str]:
    """Yield sentences that explain why this node, with this code and the names of its secrets, cannot run the plan."""
    plan = plan_file.plan
    if node.node_class.name != plan.node_class:
        yield f"this node is of class '{node.node_class}'; the plan asks for '{plan.node_class}'"
    there = len(node.devices.devices)
    if there < node.node_class.occupied(plan.devices) or plan.devices not in node.node_class.spreads(there):
        yield f"this node has {there} devices; the plan asks for {plan.devices}"
    if plan.baseline.config.nodes > 1:
        yield f"the plan runs over {plan.baseline.config.nodes} nodes, which only a worker of a service does"
    problems = differences(plan_file)
    yield from problems
    if problems:
        yield "the plan was made by another version of the code; plan the spec again with the code of this node"
        return
    needed = {name for arm in plan.arms for name in arm.config.secrets}
    yield from (lacks_secret(node.name, name, secrets) for name in sorted(needed.difference(secrets)))


def remarks(plan_file: PlanFile, node: Node) -> Iterator[str]:
    """Yield sentences about circumstances that do not stop a run."""
    own_digest = code_digest()
    if plan_file.code_digest != own_digest:
        yield (
            f"the plan was made with other source files of kernels, model or workers ({plan_file.code_digest[:19]}; "
            f"here: {own_digest[:19]}); arms and order are the same, and the receipts name the code of this node"
        )
    carried = carried_plan(plan_file)
    if carried is not None and carried.registered_at is None:
        yield f"{NOT_REGISTERED}; to change that: ablate plan SPEC --out PLAN, with a service"
    yield from node.lacks


def parse_numbers(text: str, blocks: int) -> tuple[int, ...]:
    """Return the block indices for `text`: numbers from 1 and ranges, such as "1-3,6"; "" means all.

    Raises ExecRefused for any other text.
    """
    if not text:
        return tuple(range(blocks))
    wanted: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isascii() and end.isdigit() for end in ends):
            raise ExecRefused(f"blocks {text!r} is not a list of numbers; allowed: for example 1-3 or 1,4,6")
        low, high = int(ends[0]), int(ends[1])
        if not 1 <= low <= high <= blocks:
            raise ExecRefused(f"blocks {part.strip()!r} is outside of the plan; allowed: 1-{blocks}")
        wanted.update(range(block_index(low), block_index(high) + 1))
    return tuple(sorted(wanted))
