"""Run a program to its end, say how it ended, and what that makes of its trial.

A program ends with its last process. A signal whose sender is unknown counts as the program's own, because a node would
otherwise answer for a program that ends itself.
"""

import errno
import math
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.in_trial.ablate import MOST_RESULT_BYTES, MOST_RESULTS, result_bytes, too_many_results
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.program_report import printable
from ablate.experiments.system.isolation import Isolation
from ablate.experiments.system.processes import command_of, descendants_of, end_all
from ablate.workers.commands.device_samples import DeviceSamples
from ablate.workers.commands.logged_results import Curve, LoggedResults, ProgramLogs
from ablate.workers.commands.printed_results import PrintedResults, ProgramOutput
from ablate.workers.commands.program_socket import ProgramSocket, TurnWanted
from ablate.workers.commands.program_start import (
    ProgramFolders,
    program_environment,
    resumed_variables,
    start_program,
)
from ablate.workers.commands.ranks import ProgramMarks, ProgramRank, RankFailure, rank_problem
from ablate.workers.isolation.node_secrets import Mask
from ablate.workers.paths import has_file_of
from ablate.workers.trials import failures
from ablate.workers.trials.result import TrialOrder

_GRACE_S = 10.0
"""Time that the other processes of a program have to end after its first process."""
_HELPERS_GRACE_S = 1.0
"""The same, of a program whose marks are whole: only its `process_s` depends on them."""
_LOST_PATIENCE_S = 5.0
"""Time that a program has to end by itself after one of its ranks failed."""
_POLL_S = 0.05
_OOM = ("OutOfMemoryError", "MemoryError")
_TOO_LARGE = ("File too large", "File size limit exceeded", "os error 27", "EFBIG", "SIGXFSZ")
"""Words of programs in several languages about a file beyond the limit."""
_EXIT = "builtins.SystemExit"
_SHELL, _CODES, _MOST_SIGNALS = 128, 256, 64
_HINTS: dict[int, str] = {
    signal.SIGBUS: "a bus error: most often shared memory (/dev/shm) or a disk is full",
    signal.SIGSEGV: "a memory error in compiled code",
    signal.SIGABRT: "compiled code gave up",
    signal.SIGXCPU: "it used up the processor time that `ulimit -t` allows",
    signal.SIGXFSZ: "it wrote a file beyond the limit",
    signal.SIGKILL: "neither the worker nor the kernel's out-of-memory killer sent it",
}
_MOST_NAMED, _LONGEST_COMMAND = 3, 120
"""Of the processes that a program left, and of its ranks."""


class RankMarks(Protocol):
    """The messages of a program, as far as its end depends on them."""

    failed: RankFailure | None
    restarts: int
    was_killed: bool

    def is_at(self, num_steps: int) -> bool:
        """Return whether every rank has marked this many steps."""

    @property
    def loops(self) -> dict[int, ProgramRank]:
        """The ranks that began a training loop."""


@dataclass(frozen=True, kw_only=True)
class ProgramEnd:
    """How a program ended."""

    exit_code: int
    """Of its first process."""
    who: str = "the program"
    """It, in a message."""
    oom_kills: int
    reported: Mapping[str, float]
    contradicted: Mapping[str, float] = field(default_factory=dict)
    """Printed numbers that contradict a reported one."""
    unread: str | None = None
    """Why a printed result cannot be read."""
    last_line: str
    """Of its log."""
    failed: RankFailure | None
    """The first exception."""
    wrong: str | None
    """What is wrong with the first message that is wrong."""
    loops: Mapping[int, ProgramRank]
    """The ranks that began a training loop."""
    lost: tuple[int, ...]
    """Ranks whose processes ended without closing their trials, before any rank failed: the first one, and those that
    had ended, too, when that was seen."""
    stopped: bool
    """Whether the program did not end by itself after it had lost a rank."""
    left: tuple[str, ...]
    """Commands of the processes that did not end after the first one."""
    most_bytes: int
    """Limit of a file."""
    reached: bool
    """Whether a file is as large as that."""


class ProgramWatch:
    """Waits for the end of a program: of its first process, then of the others; of all of them when a rank is lost."""

    def __init__(self, first: "subprocess.Popen[bytes]", receiver: int) -> None:
        self._poll = select.poll()
        self._poll.register(receiver, select.POLLIN)
        self._handles: dict[int, int] = {}
        """Processes by their open handles."""
        self._ranks: dict[int, int] = {}
        """Ranks by processes."""
        self._over: set[int] = set()
        """Processes that ended."""
        self._lost_at = math.inf
        self._woke_at, self._must_end_by = math.nan, math.inf
        self._was_whole = False
        self._first = first
        self.lost: tuple[int, ...] = ()
        self.stopped = False
        self.to_be_killed = False
        """Whether the program is at the step after which it has to be killed and started again."""
        self.left: tuple[str, ...] = ()
        self.ended_at: float | None = None
        """Moment at which the last process had ended; None where some had to be ended."""
        self._follow(first.pid)

    def close(self) -> None:
        """Close all handles."""
        for handle in self._handles:
            os.close(handle)

    def to_the_end(self, take: Callable[[], None], marks: RankMarks, config: ProgramArm) -> None:
        """Call `take` for the messages that have arrived until the program has ended and none is left."""
        over = False
        while not over:
            self.wait()
            take()
            self.to_be_killed = config.resume_at is not None and not marks.was_killed and marks.is_at(config.resume_at)
            over = self.to_be_killed or self.is_over(marks, config)
        take()
        self.close()

    @property
    def first_has_ended(self) -> bool:
        """Whether the first process has ended, after which the others have to end soon."""
        return self._first.pid in self._over

    def follow_rank(self, rank: int, pid: int) -> None:
        """Note that this process has to close the trial of `rank`."""
        self._ranks[pid] = rank
        self._follow(pid)

    def forget_ranks(self) -> None:
        """Note that the ranks begin again."""
        self._ranks.clear()
        self._lost_at, self.lost = math.inf, ()

    def wait(self) -> None:
        """Wait for a message or for the end of a process, but not for long."""
        for handle, _events in self._poll.poll(_POLL_S * 1e3):
            if handle in self._handles:
                self._over.add(self._handles.pop(handle))
                self._poll.unregister(handle)
                os.close(handle)
        self._woke_at = time.monotonic()

    def is_over(self, marks: RankMarks, config: ProgramArm) -> bool:
        """Return whether the program has ended or has to be ended; call it after the messages were received."""
        self._note_lost(marks)
        if self._first.pid not in self._over:
            self.stopped = self._woke_at > self._lost_at + _LOST_PATIENCE_S
            return self.stopped
        self._first.wait()
        if _no_child_is_left():
            self.ended_at = self._woke_at
            return True
        whole = config.needs != "process" and bool(marks.loops) and rank_problem(marks.loops, config) is None
        if math.isinf(self._must_end_by) or whole != self._was_whole:
            self._must_end_by, self._was_whole = self._woke_at + (_HELPERS_GRACE_S if whole else _GRACE_S), whole
        pids = descendants_of([os.getpid()])
        if self._woke_at > min(self._must_end_by, self._lost_at + _LOST_PATIENCE_S):
            commands = (command_of(pid)[:_LONGEST_COMMAND] or f"process {pid}" for pid in pids)
            self.left = () if whole else tuple(map(printable, commands))
            return True
        for pid in pids:
            self._follow(pid)
        return False

    def _follow(self, pid: int) -> None:
        if pid in self._handles.values():
            return
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self._over.add(pid)
            return
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:  # very many processes: the next look finds those that live
                return
            raise
        self._handles[handle] = pid
        self._poll.register(handle, select.POLLIN)

    def _note_lost(self, marks: RankMarks) -> None:
        """Note the first rank that failed, or died; under a launcher that starts it again, none."""
        if marks.restarts or not math.isinf(self._lost_at):
            return
        if marks.failed is not None:
            self._lost_at = self._woke_at
            return
        dead = [rank for pid, rank in self._ranks.items() if pid in self._over]
        self.lost = tuple(sorted(rank for rank in dead if marks.loops[rank].closed is None))
        self._lost_at = self._woke_at if self.lost else math.inf


def _no_child_is_left() -> bool:
    """Return whether no process of the program lives: this process is the parent of those that lost theirs."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return False
    return True


def program_failure(config: ProgramArm, end: ProgramEnd) -> tuple[FailureClass, str] | None:
    """Return the failure class of a program's end and why; None for a whole measurement."""
    problems = [*_problems(config, end)]
    if not problems:
        return None
    text = printable(" ".join("; ".join(problems).split()))
    if end.oom_kills:
        message = f"the kernel's out-of-memory killer ended a process of {end.who}; {text}"
        return FailureClass.OOM, message[: failures.MESSAGE_LIMIT]
    if end.reached or any(words in text for words in _TOO_LARGE):
        return FailureClass.OUTPUT_LIMIT, f"{failures.too_large(end.most_bytes)}; {text}"[: failures.MESSAGE_LIMIT]
    failed = end.failed
    memory = failed is not None and (failed.kind.rpartition(".")[2] in _OOM or failures.names_memory(failed.message))
    return (FailureClass.OOM if memory else FailureClass.USER_ERROR), text[: failures.MESSAGE_LIMIT]


def _problems(config: ProgramArm, end: ProgramEnd) -> Iterator[str]:
    """Yield what is wrong with a program's end, the cause first."""
    several = len(end.loops) > 1 or any((rank.world or 1) > 1 for rank in end.loops.values())
    died = bool(end.lost) and (several or end.stopped)
    if died:
        names = " and ".join(_who(rank, end, several) for rank in end.lost[:_MOST_NAMED])
        yield f"{names} died before the end of {'its trial' if len(end.lost) == 1 else 'their trials'}"
    if end.failed is not None:
        yield f"{_who(end.failed.rank, end, several)} {_raised(end.failed)}"
    elif end.exit_code and not end.stopped:
        yield f"{end.who} {exit_words(end.exit_code)}: {end.last_line}"
    elif not died and (problem := end.wrong or _incomplete(config, end)) is not None:
        yield problem
    if end.stopped:
        yield f"the rest of the program had not ended {_LOST_PATIENCE_S:g} s later, and was ended"
    if end.left:
        more = f" and {len(end.left) - _MOST_NAMED} more" if len(end.left) > _MOST_NAMED else ""
        yield (
            f"the command ended while its own processes still ran: {', '.join(end.left[:_MOST_NAMED])}{more};"
            f" it has to wait for them (in a shell: `wait`) or end them within {_GRACE_S:g} s"
        )


def _who(number: int, end: ProgramEnd, several: bool) -> str:
    world = max((rank.world or 1 for rank in end.loops.values()), default=1)
    return f"rank {number} of {max(world, len(end.loops))}" if several else end.who


def _raised(failed: RankFailure) -> str:
    if failed.kind != _EXIT:
        return f"raised {failed.kind}: {failed.message}"
    if not re.fullmatch(r"-?\d{1,9}", failed.message):
        return f"ended itself: {failed.message}"
    code = int(failed.message)
    return exit_words(code % _CODES) if abs(code) < _CODES else f"ended with exit code {code}"


def exit_words(code: int) -> str:
    """Return what an exit code says: of a process, -N for signal N; of a shell or of Python, which report signals."""
    if code < 0:
        return f"died of {_signal_words(-code)}"
    if _SHELL < code <= _SHELL + _MOST_SIGNALS:
        return f"ended with exit code {code}, as a shell reports {_signal_words(code - _SHELL)}"
    if _CODES - _MOST_SIGNALS < code < _CODES - 1:  # the last one is most often sys.exit(-1)
        return f"ended with exit code {code}, as Python reports {_signal_words(_CODES - code)}"
    return f"ended with exit code {code}"


def _signal_words(number: int) -> str:
    hint = _HINTS.get(number)
    return failures.signal_name(number) + ("" if hint is None else f" ({hint})")


def _incomplete(config: ProgramArm, end: ProgramEnd) -> str | None:
    """Return what a program that ended well left out, None if nothing."""
    loops = end.loops
    if not loops and config.needs != "process":
        return "the program marked no steps: use the module ablate (docs/own-code.md), or decide by process_s"
    problem = rank_problem(loops, config)
    if problem is not None:
        return problem
    every = range(config.steps.total)
    if config.needs == "tokens" and not all(sum(rank.tokens.get(i, 0) for rank in loops.values()) for i in every):
        return "the program reported no tokens for a step, but tokens_per_s decides"
    return _results_problem(config, end)


def not_finite(values: Mapping[str, float]) -> dict[str, float]:
    """Return the results that are NaN or infinite."""
    return {name: value for name, value in values.items() if not math.isfinite(value)}


def _results_problem(config: ProgramArm, end: ProgramEnd) -> str | None:
    """Return what is wrong with the program's results, None if nothing is."""
    if end.unread is not None:
        return end.unread
    num_bytes = sum(map(result_bytes, end.reported))
    if len(end.reported) > MOST_RESULTS or num_bytes > MOST_RESULT_BYTES:
        return too_many_results(len(end.reported), num_bytes)
    missing = [] if config.evaluate is not None else sorted(config.metrics.keys() - end.reported.keys())
    if missing and missing[0] in config.lines:
        return f"{end.who} printed no line '{config.lines[missing[0]]}', which workload.metrics names for {missing[0]}"
    if missing:
        return f"{end.who} did not report '{missing[0]}', which workload.metrics declares"
    infinite = sorted(not_finite(end.reported))
    return f"{end.who} reported {end.reported[infinite[0]]} as '{printable(infinite[0])}'" if infinite else None


_LOG_BYTES = 2**20
"""End of the log in which the last exception is searched."""
_EXCEPTION = re.compile(r"(?:\[rank\d+\]: *)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)(?:: .*)?)")


def last_line_of(log: BinaryIO, *, since: int = 0) -> str:
    """Return the line of a log that says most about its end: the last exception, else the last one with a word.

    torchrun ends its log with a frame around a summary, in which the exception of a rank is missing. Only bytes from
    `since` on count.
    """
    log.seek(0, os.SEEK_END)
    log.seek(max(since, log.tell() - _LOG_BYTES))
    lines = [line.strip() for line in log.read(_LOG_BYTES).decode("utf-8", "replace").splitlines()]
    named = [found[1] for line in lines if (found := _EXCEPTION.fullmatch(line)) and "ChildFailed" not in line]
    line = next((line for line in [*named[-1:], *reversed(lines)] if re.search(r"\w", line)), "its log is empty")
    return printable(line[:300])


class Follower:
    """Takes a program's messages while it runs."""

    def take(self, receiver: ProgramSocket, marks: ProgramMarks, _watch: ProgramWatch) -> None:
        """Take the messages that have arrived."""
        for message in receiver.messages():
            if isinstance(marks.take(message.content, message.seen, message.sender), TurnWanted | None):
                receiver.answer(message)  # of a wrong message, too: its trial fails, and nobody should wait for that

    def ended(self) -> None:
        """Notice that the program has ended, before what it left is ended."""


@dataclass(frozen=True, kw_only=True)
class ProgramRun:
    """A program that has ended."""

    end: ProgramEnd
    marks: ProgramMarks
    reported: Mapping[str, float]
    """Its own results."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """Of the metrics that it logged or printed."""
    ended_at: float | None = None
    """Moment at which its last process had ended; None where some had to be ended."""
    samples: DeviceSamples = field(default_factory=lambda: DeviceSamples(0))
    measured: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the trial's result beside the steps."""
    node_of_rank: Mapping[int, str] = field(default_factory=dict)
    """Of a trial over several nodes."""


@dataclass(frozen=True, kw_only=True)
class _Started:
    """What is started, and where its output goes."""

    argv: list[str]
    folder: Path
    log: BinaryIO
    lines: Mapping[str, str]
    reach: Isolation | None

    def run(
        self,
        environment: Mapping[str, str],
        receiver: ProgramSocket,
        marks: ProgramMarks,
        follower: Follower,
        config: ProgramArm,
    ) -> tuple["subprocess.Popen[bytes]", ProgramWatch, PrintedResults]:
        """Run it until all its processes have ended, or have been ended."""
        with ProgramOutput(self.log.fileno(), self.lines) as output:
            process = start_program(self.argv, self.folder, environment, output=output.writer, reach=self.reach)
            output.follow(process.kill)
            watch = ProgramWatch(process, receiver.fileno())
            watch.to_the_end(lambda: follower.take(receiver, marks, watch), marks, config)
            follower.ended()
            end_all(lambda: descendants_of([os.getpid()]), grace_s=0)  # nothing of the program may touch the result
            process.wait()
            return process, watch, output.finish()


def run_to_end(  # noqa: PLR0913 - two programs of a trial differ in these
    order: TrialOrder,
    config: ProgramArm,
    folders: ProgramFolders,
    log: BinaryIO,
    *,
    follower: Follower | None = None,
    lines: Mapping[str, str],
    who: str = "the program",
    variables: Mapping[str, str] | None = None,
    reach: Isolation | None = None,
    before: Mapping[str, float] | None = None,
) -> ProgramRun:
    """Run a program with all its processes to the end. Raises DataError if it cannot be started.

    `lines` are those whose numbers it prints, `variables` are added to its environment, and `before` are results of the
    trial so far, which count for the limit of results.
    """
    follower = follower or Follower()
    receiver, marks, since = ProgramSocket(), ProgramMarks(config, Mask(order.secrets)), log.tell()
    logs = ProgramLogs(config.logged, order.paths.folder)
    environment = program_environment(order, config, folders, address=receiver.address, logging=logs.variables())
    environment |= variables or {}
    oom_before = failures.kernel_oom_kills()
    started = _Started(
        argv=config.argv(out=str(folders.out)), folder=folders.working, log=log, lines=lines, reach=reach
    )
    with receiver:
        process, watch, printed = started.run(environment, receiver, marks, follower, config)
        if watch.to_be_killed:
            marks.begin_again()
            environment |= resumed_variables(environment)
            process, watch, printed = started.run(environment, receiver, marks, follower, config)
    uncounted = config.metrics.keys() if config.evaluate is not None else frozenset[str]()
    reported = {**printed.values, **marks.reported, **not_finite(printed.values)}
    reported = {name: value for name, value in reported.items() if math.isfinite(value) or name not in uncounted}
    failing = process.returncode != 0 or marks.failed is not None
    logged = LoggedResults() if failing else logs.read()
    contradicted = printed.contradicting(reported) | logged.contradicting({**printed.values, **reported})
    reported |= logged.values
    end = ProgramEnd(
        who=who,
        exit_code=process.returncode,
        oom_kills=failures.kernel_oom_kills() - oom_before,
        reported={**(before or {}), **reported},
        contradicted=contradicted,
        unread=printed.problem(besides=uncounted) or logged.problem,
        last_line=last_line_of(log, since=since),  # the open file, because the program may have removed its name
        failed=marks.failed,
        wrong=marks.wrong,
        loops=marks.loops,
        lost=watch.lost,
        stopped=watch.stopped,
        left=watch.left,
        most_bytes=order.most_bytes,
        reached=failing and has_file_of(order.paths.folder, order.most_bytes),
    )
    drawn = {} if failing else {name: own for name, own in printed.curves.items() if name not in uncounted}
    curves = {**drawn, **logged.curves}
    return ProgramRun(end=end, marks=marks, reported=reported, curves=curves, ended_at=watch.ended_at)
