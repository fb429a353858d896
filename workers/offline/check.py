"""`ablate check`: run a command a few steps long without a service, and say what a trial of it would record."""

import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from secrets import token_hex
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ablate.experiments.design.kinds.command import HIDDEN_FAILURES, CommandArm, hides_failures
from ablate.experiments.design.kinds.program import CLOCK_S, marked_steps
from ablate.experiments.design.problems import listed
from ablate.experiments.design.workload import ARCHIVE
from ablate.experiments.errors import CodeArchiveError
from ablate.experiments.outcomes import ExitCode
from ablate.experiments.records.code_archive import PackedCode, pack_code
from ablate.experiments.records.program_report import clocks_differ, printable
from ablate.experiments.system.isolation import remove_short_links
from ablate.experiments.system.kernel_limits import keeps_signals_in
from ablate.experiments.system.processes import descendants_of, end_family_with_parent
from ablate.workers.commands.code_copy import archive_path
from ablate.workers.devices.inventory import find_devices
from ablate.workers.environment_variables import secrets_file, state_folder, trial_disk_bytes
from ablate.workers.errors import SettingsError, WorkerError
from ablate.workers.isolation.node_secrets import Mask, read_secrets
from ablate.workers.paths import MOST_OUTPUT, WorkPaths
from ablate.workers.processes import trial
from ablate.workers.processes.guardian import end_trial
from ablate.workers.trials.failures import classify_exit, disk_is_full, kernel_oom_kills
from ablate.workers.trials.result import TrialOrder, TrialResult, read_result

SEEDS = (1, 1, 2)
"""Seeds of the runs: a repeat shows whether the program is exact, another seed whether it uses its seed."""
_LOG_LINES = 15
_SHOWN_RESULTS = 20


@dataclass(frozen=True, kw_only=True)
class ProgramCheck:
    """One question about a program, and its answer."""

    name: str
    passed: bool
    detail: str
    needed: bool = True
    """Whether Ablate cannot measure throughput without it."""


def check(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="Program and arguments; {seed} is filled in.")
    ],
    code: Annotated[
        Path, typer.Option(help="Folder of the program. It is packed as for `code: .`, and runs in a copy.")
    ] = Path(),
    secret: Annotated[
        list[str] | None, typer.Option(help="Variable with a key, from the file of ABLATE_SECRETS; repeatable.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps of the measured window.")] = 5,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one run may take.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Run a training program three times for a few steps, and say what Ablate sees of it and what is missing.

    Exit code: 0 when a spec can measure its throughput, 6 when something needed is missing, 5 when nothing could run.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        packed = pack_code(code)
        secrets = _secrets(secret or [])
    except (CodeArchiveError, WorkerError) as error:
        console.print(f"[red]not run:[/] {escape(str(error))}")
        raise typer.Exit(ExitCode.ERROR) from error
    config = CommandArm(
        command=tuple(command),
        code={ARCHIVE: packed.digest},
        secrets=tuple(secrets),
        profile=True,
        steps=marked_steps(warmup=1, timed=steps),
    )
    try:
        keeper = _Keeper(config, packed, secrets=secrets, timeout_s=timeout, most_bytes=_most_bytes())
        results = _results(keeper, console)
    except WorkerError as error:
        console.print(f"[red]not run:[/] {escape(str(error))}")
        raise typer.Exit(ExitCode.ERROR) from error
    checks = list(checks_of(config, results))
    if as_json:
        sys.stdout.write(json.dumps([dataclasses.asdict(one) for one in checks], indent=2) + "\n")
    else:
        Console().print(_table(checks))
    if any(one.needed and not one.passed for one in checks):
        raise typer.Exit(ExitCode.UNMET)


def _secrets(names: Sequence[str]) -> dict[str, str]:
    """Return the secrets of these names. Raises SettingsError for one that is not there."""
    path = secrets_file()
    own = {} if path is None else read_secrets(path)
    missing = next((name for name in names if name not in own), None)
    if missing is not None:
        where = path or f"ABLATE_SECRETS or {state_folder() / 'secrets'}, which are missing"
        raise SettingsError(f"there is no secret {missing} in {where}; it has: {listed(sorted(own))}")
    return {name: own[name] for name in names}


def _most_bytes() -> int:
    try:
        return trial_disk_bytes(MOST_OUTPUT.bytes)
    except ValueError as error:
        raise SettingsError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class _CheckRun:
    """One run of the program."""

    result: TrialResult | None = None
    error: str | None = None
    """Why there is no result."""
    log: tuple[str, ...] = ()
    """The end of its log, of a run that failed."""


def _results(keeper: "_Keeper", console: Console) -> list[TrialResult]:
    """Return the results of the runs, up to the first that failed. Raises WorkerError for a run without one."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:
            signal.signal(ending, _leave)
    results: list[TrialResult] = []
    try:
        runs = keeper.start()
        for number, seed in enumerate(SEEDS, start=1):
            console.print(f"run {number} of {len(SEEDS)}, seed {seed}", style="dim")
            run = runs.recv()
            if run.result is None:
                raise WorkerError(run.error)
            results.append(run.result)
            for line in run.log:
                console.print(f"  {line}", style="dim", markup=False)
            if run.result.failure_class is not None:
                break
    except EOFError as error:
        raise WorkerError("the process that runs the program was killed") from error
    finally:
        keeper.end()
    return results


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


class _Keeper:
    """A process that runs the program, and leaves no process and no file of it, even if the command is killed."""

    def __init__(
        self,
        config: CommandArm,
        packed: PackedCode,
        *,
        secrets: Mapping[str, str],
        timeout_s: float,
        most_bytes: int,
    ) -> None:
        self._config, self._packed, self._secrets = config, packed, secrets
        self._timeout_s, self._most_bytes = timeout_s, most_bytes
        self._folder = Path(tempfile.gettempdir()) / f"ablate-check-{token_hex(8)}"
        self._process: BaseProcess | None = None

    def start(self) -> "Connection[None, _CheckRun]":
        """Start the process; return the pipe from which its runs come."""
        ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
        self._process = multiprocessing.get_context("fork").Process(target=self._keep, args=(theirs, os.getpid()))
        self._process.start()
        theirs.close()
        return ours

    def end(self) -> None:
        """End the process with all that it runs."""
        if self._process is not None:
            self._process.terminate()
            self._process.join()

    def _keep(self, runs: "Connection[_CheckRun, None]", command: int) -> None:
        os.setsid()  # signals of the terminal reach the command only, which ends this process
        for ending in (signal.SIGINT, signal.SIGHUP):
            signal.signal(ending, signal.SIG_IGN)
        end_family_with_parent(parent=command, last=self._clean)
        try:
            self._folder.mkdir(mode=0o700)
            archive = archive_path(self._folder / "data", self._packed.digest)
            archive.parent.mkdir(parents=True)
            archive.write_bytes(b"".join(self._packed.pieces()))
            for number, seed in enumerate(SEEDS, start=1):
                runs.send(run := self._run(seed, number))
                if run.result is None or run.result.failure_class is not None:
                    return
        finally:
            self._clean()

    def _clean(self) -> None:
        remove_short_links(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, seed: int, number: int) -> _CheckRun:
        """Run the program once in processes of its own, all of which have ended by then."""
        paths = WorkPaths(home=self._folder).trial(f"run-{number}", "trial")
        try:
            order = TrialOrder(
                trial_id=f"check-{number}-{self._folder.name}",
                config=self._config.with_seed(seed),
                paths=paths,
                data_dir=self._folder / "data",
                secrets=self._secrets,
                device_type=find_devices().node_class.device_type,
                most_bytes=self._most_bytes,
            )
            result = self._process_result(dataclasses.replace(order, prepare_only=True), paths.prepared)
            if result.failure_class is None:
                result = self._process_result(dataclasses.replace(order, dataset=result.data_folder), paths.result)
        except WorkerError as error:
            return _CheckRun(error=str(error))
        return _CheckRun(result=result, log=() if result.failure_class is None else _end_of(paths.log))

    def _process_result(self, order: TrialOrder, target: Path) -> TrialResult:
        oom_before = kernel_oom_kills()
        process = multiprocessing.get_context("fork").Process(target=trial.main, args=(order,))
        process.start()
        process.join(self._timeout_s)
        late = process.is_alive()
        end_trial(
            process.pid or 0,
            trial_id=order.trial_id,
            grace_s=0.0,
            leader=process.is_alive,
            orphans=lambda: descendants_of([os.getpid()]),
        )
        process.join()
        Mask(order.secrets).file(order.paths.log)
        if late:
            raise WorkerError(f"the program had not ended after {self._timeout_s:g} s")
        result = read_result(target)
        if result is not None:
            return result
        failure, message = classify_exit(
            process.exitcode or 0,
            oom_kills=kernel_oom_kills() - oom_before,
            disk_full=disk_is_full(self._folder),
            may_kill_itself=not keeps_signals_in(),
            has_own_files=True,
        )
        return TrialResult.partial(failure_class=failure, message=message)


def _end_of(log: Path) -> tuple[str, ...]:
    return tuple(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:])


def checks_of(config: CommandArm, results: Sequence[TrialResult]) -> Iterator[ProgramCheck]:
    """Yield the answers about a program from its runs with `SEEDS`, fewer if one failed."""
    last = results[-1]
    if last.failure_class is not None:
        yield ProgramCheck(name="runs", passed=False, detail=f"{last.failure_class}: {last.message}")
        return
    report, first = last.program, results[0]
    if report is None:
        raise AssertionError("a program ended without a report")
    yield ProgramCheck(name="runs", passed=True, detail=f"{len(results)} times{_took(last)}")
    if hides_failures(config.command):
        detail = f"{HIDDEN_FAILURES}: write bash -o pipefail -c"
        yield ProgramCheck(name="pipe", passed=False, needed=False, detail=detail)
    if not report.ranks:
        detail = "no marks: only the time of the whole process can decide (process_s); docs/own-code.md shows the marks"
        yield ProgramCheck(name="steps", passed=False, detail=detail)
        yield _reported(report.reported)
        return
    detail = f"{config.steps.total} of {config.steps.total}, by {report.ranks} rank{'s' * (report.ranks > 1)}"
    yield ProgramCheck(name="steps", passed=True, detail=detail)
    yield _tokens(last)
    yield _clock(report.window_s or 0.0, report.window_seen_s or 0.0)
    yield from _losses(results)
    echoed = report.seed is not None
    how = f"{report.seed}, as asked" if echoed else "not reported: read trial.seed, or write ablate.trial(seed=...)"
    yield ProgramCheck(name="seed", passed=echoed, needed=False, detail=how)
    peak = first.peak_reserved_bytes
    where = "of the largest process" if first.peak_allocated_bytes == peak else "reserved by torch's allocator"
    memory = "not visible" if peak is None else f"{peak / 2**20:,.0f} MiB, {where}"
    yield ProgramCheck(name="memory", passed=peak is not None, needed=False, detail=memory)
    yield _reported(report.reported)
    kernels = f"{len(report.kernels)} in one step" if report.kernels else "none: torch is not loaded"
    yield ProgramCheck(name="kernels", passed=bool(report.kernels), needed=False, detail=kernels)


def _took(result: TrialResult) -> str:
    if result.process_s is None:
        return "; its processes had to be ended after its first one, so process_s is not measured"
    return f", {result.process_s:.1f} s at last"


def _tokens(result: TrialResult) -> ProgramCheck:
    counts = sorted({step.tokens for step in result.program_steps})
    if not counts[0]:
        return ProgramCheck(name="tokens", passed=False, detail="a step without tokens: write step.report(tokens=...)")
    equal = f"{counts[0]:,} a step" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,} a step"
    return ProgramCheck(name="tokens", passed=True, detail=equal)


def _clock(window_s: float, seen_s: float) -> ProgramCheck:
    detail = f"a window of {window_s:.3g} s; the worker's clock differs by {1e3 * abs(window_s - seen_s):.2f} ms"
    if window_s < 100 * CLOCK_S:
        detail += "; a real window needs more steps"
    return ProgramCheck(name="clock", passed=not clocks_differ(window_s, seen_s), detail=detail)


def _losses(results: Sequence[TrialResult]) -> Iterator[ProgramCheck]:
    losses = [[step.loss for step in result.program_steps] for result in results]
    if any(loss is None for own in losses for loss in own):
        yield ProgramCheck(
            name="loss", passed=False, needed=False, detail="a step without loss: write step.report(loss=...)"
        )
        return
    shown = f"{losses[0][0]:.6g} to {losses[0][-1]:.6g}"
    exact = "bit for bit" if losses[0] == losses[1] else "not bit for bit: it is not deterministic"
    yield ProgramCheck(name="loss", passed=True, needed=False, detail=f"{shown}; a repeat agrees {exact}")
    uses = losses[2] != losses[0]
    detail = "another seed gives other losses" if uses else "another seed gives the same losses: the seed is ignored"
    yield ProgramCheck(name="seed matters", passed=uses, needed=False, detail=detail)


def _reported(values: Mapping[str, float]) -> ProgramCheck:
    shown = [f"{printable(name)}={value:.6g}" for name, value in values.items()]
    more = [f"and {len(shown) - _SHOWN_RESULTS:,} more"] if len(shown) > _SHOWN_RESULTS else []
    detail = ", ".join([*shown[:_SHOWN_RESULTS], *more])
    detail = detail or "nothing: write trial.report(name=value), or print METRIC name=value"
    return ProgramCheck(name="metrics", passed=bool(shown), needed=False, detail=detail)


def _table(checks: Sequence[ProgramCheck]) -> Table:
    table = Table(title="check of a program", title_justify="left")
    for column in ("check", "state", "detail"):
        table.add_column(column, overflow="fold")
    for one in checks:
        state = "[green]ok[/]" if one.passed else "[red]missing[/]" if one.needed else "[yellow]absent[/]"
        table.add_row(one.name, state, escape(one.detail))
    return table
