"""Runs of programs for `ablate check`: each is a trial, isolated as on this machine's worker, without a service."""

import dataclasses
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from secrets import token_hex

from rich.console import Console

from ablate.experiments.design.kinds.command import CommandArm
from ablate.experiments.design.problems import listed
from ablate.experiments.records.spec_code import PackedSpec
from ablate.experiments.system.isolation import remove_short_links
from ablate.experiments.system.kernel_limits import keeps_signals_in
from ablate.experiments.system.processes import descendants_of, end_family_with_parent
from ablate.workers.commands.code_copy import archive_path, data_problem, private_places
from ablate.workers.devices.inventory import find_devices
from ablate.workers.environment_variables import python_environments, secrets_file, state_folder, trial_disk_bytes
from ablate.workers.errors import SettingsError, WorkerError
from ablate.workers.isolation.environment import wait_passively
from ablate.workers.isolation.node_secrets import Mask, read_secrets
from ablate.workers.isolation.reach import isolation_problem
from ablate.workers.paths import MOST_OUTPUT, WorkPaths
from ablate.workers.processes import trial
from ablate.workers.processes.guardian import end_trial
from ablate.workers.trials.failures import classify_exit, disk_is_full, kernel_oom_kills
from ablate.workers.trials.result import TrialOrder, TrialResult, read_result

_LOG_LINES = 15
_SHORTER = (
    "give it longer, such as --timeout 1800, or an argument for fewer steps or epochs, or mark its steps with the "
    "module ablate: a check then runs a few of them (docs/own-code.md)"
)
_SHOW_EVERY_S = {True: 1.0, False: 30.0}
"""Time between two looks at the clock on a terminal, where one line stays, and elsewhere, where each is a line."""


@dataclass(frozen=True, kw_only=True)
class WantedRun:
    """One run of a program."""

    config: CommandArm
    seed: int
    words: str
    """Which one it is, for people."""


def secrets_named(names: Sequence[str]) -> dict[str, str]:
    """Return the secrets of these names. Raises SettingsError for one that is not there."""
    path = secrets_file()
    own = {} if path is None else read_secrets(path)
    missing = next((name for name in names if name not in own), None)
    if missing is not None:
        where = path or f"ABLATE_SECRETS or {state_folder() / 'secrets'}, which are missing"
        raise SettingsError(f"there is no secret {missing} in {where}; it has: {listed(sorted(own))}")
    return {name: own[name] for name in names}


def _own_secrets() -> tuple[Path, ...]:
    """Return the files and folders that stay closed to trials."""
    named = secrets_file()
    return (state_folder(), *([] if named is None else [named]))


def _prefix_of(config: CommandArm) -> Path | None:
    """Return the folder of the Python environment of a program. Raises WorkerError if this machine has none."""
    environments = python_environments()
    if config.environment is not None and config.environment not in environments:
        names = listed(sorted(environments)) or "none"
        raise WorkerError(
            f"there is no Python environment '{config.environment}' (ABLATE_ENVIRONMENTS); known: {names}"
        )
    return None if config.environment is None else environments[config.environment]


def _most_bytes() -> int:
    try:
        return trial_disk_bytes(MOST_OUTPUT.bytes)
    except ValueError as error:
        raise SettingsError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class CheckRun:
    """How one run ended."""

    wall_s: float = 0.0
    result: TrialResult | None = None
    error: str | None = None
    """Why there is no result."""
    log: tuple[str, ...] = ()
    """The end of its log, of a run that failed."""


def results_of(keeper: "Keeper", console: Console, *, until_failure: bool = True) -> list[CheckRun]:
    """Return how the runs ended, up to the first that failed: of any if so asked, else the first of all.

    Raises WorkerError for one without result.
    """
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:
            signal.signal(ending, _leave)
    ended: list[CheckRun] = []
    try:
        runs, most = keeper.start(), len(keeper.wanted)
        longest = f"{most} runs of the program, each of at most {keeper.timeout_s:g} s; longer: --timeout SECONDS"
        console.print(longest, style="dim")
        for number, wanted in enumerate(keeper.wanted, start=1):
            run = _awaited(runs, console, f"run {number} of {most}{wanted.words}", keeper.timeout_s)
            if run.result is None:
                raise WorkerError(run.error)
            ended.append(run)
            for line in run.log:
                console.print(f"  {line}", style="dim", markup=False)
            if run.result.failure_class is not None and (until_failure or number == 1):
                break
    except EOFError as error:
        raise WorkerError("the process that runs the program was killed") from error
    finally:
        keeper.end()
    return ended


def _awaited(runs: "Connection[None, CheckRun]", console: Console, words: str, timeout_s: float) -> CheckRun:
    """Return the next run, and show meanwhile which one it is and how long it has taken."""
    console.print(words, style="dim")
    began, every_s = time.monotonic(), _SHOW_EVERY_S[console.is_terminal]
    with console.status(words, refresh_per_second=1) if console.is_terminal else nullcontext() as status:
        while not runs.poll(every_s):
            elapsed = f"{words}: {time.monotonic() - began:.0f} s of at most {timeout_s:g} s"
            if status is None:
                console.print(elapsed, style="dim")
            else:
                status.update(elapsed)
    return runs.recv()


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


class Keeper:
    """A process that runs the program, and leaves no process and no file of it, even if the command is killed."""

    def __init__(
        self,
        wanted: Sequence[WantedRun],
        packed: PackedSpec,
        *,
        origin: Path,
        secrets: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        """Prepare runs of the code in `packed`, which was packed from the folder `origin`. Raises SettingsError."""
        self.wanted, self.timeout_s = wanted, timeout_s
        self._packed, self._origin, self._secrets = packed, origin, secrets
        self._most_bytes = _most_bytes()
        self._folder = Path(tempfile.gettempdir()) / f"ablate-check-{token_hex(8)}"
        self._process: BaseProcess | None = None

    def start(self) -> "Connection[None, CheckRun]":
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

    def _keep(self, runs: "Connection[CheckRun, None]", command: int) -> None:
        os.setsid()  # signals of the terminal reach the command only, which ends this process
        for ending in (signal.SIGINT, signal.SIGHUP):
            signal.signal(ending, signal.SIG_IGN)
        end_family_with_parent(parent=command, last=self._clean)
        wait_passively()  # as in a trial: its times size trials
        try:
            self._folder.mkdir(mode=0o700)
            for code in self._packed.archives:
                archive = archive_path(self._folder / "data", code.digest)
                archive.parent.mkdir(parents=True, exist_ok=True)
                archive.write_bytes(b"".join(code.pieces()))
            for number, wanted in enumerate(self.wanted, start=1):
                runs.send(run := self._run(wanted, number))
                if run.result is None:
                    return
        finally:
            self._clean()

    def _clean(self) -> None:
        remove_short_links(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, wanted: WantedRun, number: int) -> CheckRun:
        """Run the program once as a trial, in processes of its own, all of which have ended by then."""
        paths = WorkPaths(home=self._folder).trial(f"run-{number}", "trial")
        try:
            order = TrialOrder(
                trial_id=f"check-{number}-{self._folder.name}",
                config=wanted.config.with_seed(wanted.seed),
                paths=paths,
                data_dir=self._folder / "data",
                environments=Path.home() / ".cache" / "ablate" / "environments",
                secrets=self._secrets,
                device_type=find_devices().node_class.device_type,
                most_bytes=self._most_bytes,
                program_prefix=_prefix_of(wanted.config),
                origin=self._origin,
            )
            self._check_data(wanted.config)
            result, order = self._prepared(order)
            began = time.monotonic()
            if result.failure_class is None:
                result = self._process_result(order, paths.result)
        except WorkerError as error:
            return CheckRun(error=str(error))
        wall_s = time.monotonic() - began
        return CheckRun(wall_s=wall_s, result=result, log=() if result.failure_class is None else _end_of(paths.log))

    def _prepared(self, order: TrialOrder) -> tuple[TrialResult, TrialOrder]:
        """Copy the code of the program and of its evaluation; return how that ended, and the order with the copies."""
        result, judge = TrialResult.partial(), order.program.judge
        if order.config.prepared is not None:
            result = self._process_result(dataclasses.replace(order, prepare_only=True), order.paths.prepared)
            prefix = result.program_prefix or order.program_prefix
            order = dataclasses.replace(order, dataset=result.data_folder, program_prefix=prefix)
        if judge is not None and result.failure_class is None:
            copying = dataclasses.replace(order, config=judge, prepare_only=True)
            result = self._process_result(copying, order.paths.prepared)
            order = dataclasses.replace(order, evaluation=result.data_folder)
        return result, order

    def _check_data(self, config: CommandArm) -> None:
        problem = data_problem(config, None, _own_secrets())
        if problem is not None:
            raise WorkerError(problem)

    def _process_result(self, order: TrialOrder, target: Path) -> TrialResult:
        if isolation_problem() is None:
            order = order.isolated((*_own_secrets(), *private_places()))
        oom_before = kernel_oom_kills()
        process = multiprocessing.get_context("fork").Process(target=trial.main, args=(order,))
        process.start()
        process.join(self.timeout_s)
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
            own = order.program.evaluate
            runs = own.title if own is not None and order.paths.evaluation.is_dir() else "the program"
            raise WorkerError(f"{runs} had not ended after {self.timeout_s:g} s; {_SHORTER}")
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
