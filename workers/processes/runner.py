"""Run trainer processes to their ends, and make sure that none of their processes is left."""

import logging
import os
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from ablate.experiments.system.isolation import short_link
from ablate.experiments.system.processes import adopt_orphans, children_of, family_of
from ablate.workers.commands.several_nodes import end_steps
from ablate.workers.environment_variables import TRIAL_PROCESSES
from ablate.workers.errors import WorkerError
from ablate.workers.isolation.environment import keep_logs_plain, wait_passively
from ablate.workers.lease import Lease, StopReason
from ablate.workers.paths import MOST_OUTPUT, SharedMemory, Usage, remove_tree, usage_of
from ablate.workers.processes.forkserver import ForkServer
from ablate.workers.processes.guardian import Guardian, end_trial
from ablate.workers.processes.wake_event import STOP_SIGNALS, StopFlag, WakeEvent
from ablate.workers.trials.failures import FORKSERVER_LOST, TOO_LATE, kernel_oom_kills
from ablate.workers.trials.result import TrialOrder

_log = logging.getLogger(__name__)

_SAMPLE_S = 0.5
"""Time between two samples of the trial's peak resident set, which is lost when the kernel kills it."""
_LOOK_S = 1.0
_LOOK_SHARE = 50
"""The worker looks at a trial's files every second, and so seldom that it spends one part in 50 of its time on it."""
_THREADS = 16
"""Threads that a trial may have for each process that it may have: every library of linear algebra starts its own."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a trainer process ended."""

    stopped: StopReason | None
    """Set if we stopped it."""
    exit_code: int
    wall_s: float
    """From the order to the end of the process, without the time in which it waited for others."""
    oom_kills: int
    """Out-of-memory kills by the kernel during the trial, of any process in the worker's control group."""
    peak_rss_bytes: int | None
    """Highest sampled resident set of any of its processes."""
    survivors: tuple[int, ...]
    """Processes that SIGKILL did not end."""
    excess: str = ""
    """Of a trial with too many processes: how many it had, and how many it may have."""


class _Output:
    """The files of a running trial. Those that it has unlinked and still writes count, too."""

    def __init__(self, folder: Path, limit: Usage, memory: SharedMemory | None) -> None:
        self._folder, self._limit, self._memory = folder, limit, memory
        self._device = folder.stat().st_dev
        self._look_at = 0.0

    def look_is_due(self) -> bool:
        """Return whether it is time for the next look."""
        return time.monotonic() >= self._look_at

    def is_too_much(self, family: Sequence[int]) -> bool:
        """Return whether the files of the trial, whose processes are `family`, use more than allowed."""
        began = time.monotonic()
        used = usage_of(self._folder)
        other = _unlinked_bytes(family, self._device) + (0 if self._memory is None else self._memory.look(family))
        now = time.monotonic()
        self._look_at = now + max(_LOOK_S, _LOOK_SHARE * (now - began))
        return used.bytes + other > self._limit.bytes or used.files > self._limit.files


class RunningTrial:
    """A trainer process between its start and its end."""

    def __init__(
        self, process: ForkServerProcess, order: TrialOrder, *, timeout_s: float, began: float, oom_before: int
    ) -> None:
        self.process = process
        self.order = order
        self.trial_id = order.trial_id
        self.pid = _pid(process)
        self.timeout_s = timeout_s
        self.spent_s = 0.0
        """Used part of its time limit: the periods in which it ran."""
        self._began = began
        """Monotonic time at which it last began to run."""
        self.oom_before = oom_before
        """The kernel's count of out-of-memory kills before its start."""
        self.peak_rss_bytes: int | None = None
        self.stopped: StopReason | None = None
        """Why it has to stop, None if it may go on."""
        self.excess = ""
        """How many processes too many it had."""
        own_tree = order.isolation is not None and order.isolation.own_tree
        self.memory = None if own_tree else SharedMemory()
        """Its files in the machine's /dev/shm, None if it has its own."""
        self.over = False
        """Whether it has ended: the kernel may use its process number again."""

    @property
    def now_spent_s(self) -> float:
        """Used part of its time limit, if it runs now."""
        return self.spent_s + time.monotonic() - self._began

    def let_go_on(self) -> None:
        """Note that it runs from now on. Call this before the message to the trainer, which may run at once."""
        self._began = time.monotonic()

    def waits(self) -> None:
        """Note that it waits or has ended; time counts again from here if it is followed further."""
        now = time.monotonic()
        self.spent_s, self._began = self.spent_s + now - self._began, now

    @property
    def lives(self) -> bool:
        """Whether the process has not ended."""
        return not _is_readable(self.process.sentinel)


class TrialRunner:
    """Starts trials on this node's fork server and ends them."""

    def __init__(
        self,
        server: ForkServer,
        guardian: Guardian,
        wake_event: WakeEvent,
        *,
        grace_s: float,
        preempted: Callable[[], bool],
        most_output: Usage = MOST_OUTPUT,
        adopts: bool = False,
    ) -> None:
        """Start no process yet.

        A trial ends when it uses more than `most_output`. With `adopts`, this process is the parent of what a killed
        fork server leaves: it must have no children except those of this class's arguments.
        """
        self.server = server
        self.guardian = guardian
        self._wake_event = wake_event
        self._grace_s = grace_s
        self._preempted = preempted
        self.is_told: Callable[[], bool] = lambda: False
        """Returns whether a signal told this process to stop."""
        self._most_output = most_output
        self._adopts = adopts
        self._trainers: set[int] = set()
        """Process numbers of the trials that have not been cleaned up."""

    def run(self, order: TrialOrder, lease: Lease, *, timeout_s: float) -> Ending:
        """Run `order` until it ends, times out, or has to stop for its lease, the service or this worker's end."""
        with self.started(order, lease, timeout_s=timeout_s) as trial:
            self.follow(trial, lease)
            return self.end(trial, lease)

    @contextmanager
    def started(self, order: TrialOrder, lease: Lease, *, timeout_s: float) -> Iterator[RunningTrial]:
        """Start a trial; leaving the context ends it in any case."""
        start, oom_before = time.monotonic(), kernel_oom_kills()
        order = replace(order, start_by=lease.until, most_bytes=self._most_output.bytes)
        process = self.server.start(order)
        trial = RunningTrial(process, order, timeout_s=timeout_s, began=start, oom_before=oom_before)
        self._trainers.add(trial.pid)
        self.guardian.watch(trial.pid, order.trial_id)
        try:
            yield trial
        finally:
            if not trial.over:
                self._end_trial(trial, grace_s=0)
                self.guardian.forget(trial.pid, order.trial_id)
                _clean(trial)

    def follow(self, trial: RunningTrial, lease: Lease, *, until: Connection | None = None) -> None:
        """Wait until the trial ends, has to stop, or writes to the pipe `until`; the wait counts for its time limit."""
        deadline = time.monotonic() + trial.timeout_s - trial.now_spent_s
        also = [trial.process.sentinel, *([] if until is None else [until.fileno()])]
        output = self._output_of(trial)
        while (reason := self._reason(lease, deadline)) is None:
            patience = min(_SAMPLE_S, deadline - time.monotonic(), lease.left_s())
            self._wake_event.wait(patience, also=also)
            with suppress(OSError):  # the kernel's death signal remains, and the worker claims no block
                self.guardian.check()
            if any(_is_readable(descriptor) for descriptor in also):
                break
            family = family_of(trial.pid)
            trial.peak_rss_bytes = max(map(_peak_rss, family), default=0) or trial.peak_rss_bytes
            trial.excess = self._excess(family)
            if trial.excess:
                reason = StopReason.PROCESS_LIMIT
                break
            if output.look_is_due() and output.is_too_much(family):
                reason = StopReason.OUTPUT_LIMIT
                break
        trial.stopped = reason
        trial.waits()

    def end(self, trial: RunningTrial, lease: Lease) -> Ending:
        """End a trial that has to stop, or the remains of one that ended by itself; return its ending."""
        start = time.monotonic()
        if trial.memory is not None:
            trial.memory.look(family_of(trial.pid))
        survivors = self._end(trial)
        if trial.order.nodes > 1 and not trial.order.prepare_only:
            with suppress(OSError):  # the next trial tries again, and the end of the job ends them
                end_steps(patience_s=0)
        trial.process.join(0 if survivors else None)
        trial.over = True
        self.guardian.forget(trial.pid, trial.trial_id)
        exit_code = trial.process.exitcode if trial.process.exitcode is not None else -signal.SIGKILL
        _clean(trial)
        too_much = StopReason.OUTPUT_LIMIT if self._output_of(trial).is_too_much(family_of(trial.pid)) else None
        return Ending(
            stopped=trial.stopped or _fenced(exit_code, lease) or self._died_with_us(exit_code) or too_much,
            exit_code=exit_code,
            wall_s=trial.spent_s + time.monotonic() - start,
            oom_kills=kernel_oom_kills() - trial.oom_before,
            peak_rss_bytes=trial.peak_rss_bytes,
            survivors=survivors,
            excess=trial.excess,
        )

    def sleep(self, seconds: float, lease: Lease) -> StopReason | None:
        """Sleep while no trial runs; return early with the reason if the block has to stop."""
        deadline = time.monotonic() + seconds
        while (reason := self._reason(lease, deadline)) is None:
            self._wake_event.wait(min(_SAMPLE_S, deadline - time.monotonic(), lease.left_s()))
        return None if reason is StopReason.TIMEOUT else reason

    def _died_with_us(self, exit_code: int) -> StopReason | None:
        """Return PREEMPTED if the signal that tells this worker to stop went to the trial, too, as from a cluster."""
        killed = -exit_code in STOP_SIGNALS or exit_code == FORKSERVER_LOST
        return StopReason.PREEMPTED if killed and self.is_told() else None

    def _output_of(self, trial: RunningTrial) -> _Output:
        return _Output(trial.order.paths.folder, self._most_output, trial.memory)

    def _excess(self, family: Sequence[int]) -> str:
        """Say how many processes or threads too many a trial has; empty if it has not."""
        most = self._most_output.processes
        if most is None:
            return ""
        threads = sum(map(_num_threads, family))
        for kind, number, allowed in (("processes", len(family), most), ("threads", threads, _THREADS * most)):
            if number > allowed:
                setting = f"the worker's {TRIAL_PROCESSES} is {most}, and allows {_THREADS} threads for each process"
                return f"{number:,} {kind} at once; allowed: {allowed:,} ({setting}; raise it for such a program)"
        return ""

    def _reason(self, lease: Lease, deadline: float) -> StopReason | None:
        reason = lease.reason()
        if reason is not None:
            return reason
        if self._preempted():
            return StopReason.PREEMPTED
        return StopReason.TIMEOUT if time.monotonic() >= deadline else None

    def _end(self, trial: RunningTrial) -> tuple[int, ...]:
        """End all processes of a trial, or only the children that outlived it; return the survivors."""
        at_once = (None, StopReason.FENCED, StopReason.OUTPUT_LIMIT, StopReason.PROCESS_LIMIT)
        grace_s = 0.0 if trial.stopped in at_once else self._grace_s
        survivors = self._end_trial(trial, grace_s=grace_s)
        if survivors:
            _log.error("trial %s: processes %s survived SIGKILL", trial.trial_id, list(survivors))
        return survivors

    def _end_trial(self, trial: RunningTrial, *, grace_s: float) -> tuple[int, ...]:
        survivors = end_trial(
            trial.pid, trial_id=trial.trial_id, grace_s=grace_s, leader=lambda: trial.lives, orphans=self._orphans
        )
        self._trainers.discard(trial.pid)
        return survivors

    def _orphans(self) -> list[int]:
        """Return what ended trials left: children of the fork server, or of this process, that we did not start."""
        server = self.server.pid
        left = [] if server is None else children_of(server)
        if self._adopts:
            helpers = {server, self.guardian.pid, self.server.tracker_pid}
            left += [pid for pid in children_of(os.getpid()) if pid not in helpers]
        return [pid for pid in left if pid not in self._trainers]


@contextmanager
def start_processes(
    wake_event: WakeEvent, *, grace_s: float, stopping: StopFlag, most_output: Usage = MOST_OUTPUT
) -> Iterator[TrialRunner]:
    """Start the fork server and the guardian of this node; leaving the context ends the guardian."""
    adopt_orphans()  # of a fork server that somebody kills
    wait_passively()
    keep_logs_plain()
    server = ForkServer()
    with Guardian() as guardian:
        server.check()
        runner = TrialRunner(
            server,
            guardian,
            wake_event,
            grace_s=grace_s,
            preempted=stopping.now,
            most_output=most_output,
            adopts=True,
        )
        runner.is_told = stopping.told_soon
        yield runner


def _clean(trial: RunningTrial) -> None:
    """Remove the temporary files of a trial that has ended, and its shared memory."""
    remove_tree(trial.order.paths.temporary)
    with suppress(OSError):
        short_link(trial.pid).unlink(missing_ok=True)
    if trial.memory is not None:
        trial.memory.sweep()


def _fenced(exit_code: int, lease: Lease) -> StopReason | None:
    """Return FENCED if the guardian, or the trial itself, ended the trial because its lease is over."""
    over = lease.reason() is StopReason.FENCED
    return StopReason.FENCED if over and exit_code in (-signal.SIGKILL, TOO_LATE) else None


def _is_readable(descriptor: int) -> bool:
    return bool(wait([descriptor], 0))


def _unlinked_bytes(pids: Iterable[int], device: int) -> int:
    """Return the space of files on `device` without a name that these processes have open."""
    sizes: dict[int, int] = {}
    for pid in pids:
        with suppress(OSError):  # it has ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    file = link.stat()
                    if stat.S_ISREG(file.st_mode) and not file.st_nlink and file.st_dev == device:
                        sizes[file.st_ino] = file.st_blocks * 512
    return sum(sizes.values())


def _peak_rss(pid: int) -> int:
    return 1024 * _status_of(pid, "VmHWM:")


def _num_threads(pid: int) -> int:
    return _status_of(pid, "Threads:")


def _status_of(pid: int, name: str) -> int:
    """Return a number from the kernel's status of a process, 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def _pid(process: ForkServerProcess) -> int:
    if process.pid is None:
        raise WorkerError("the fork server gave a trial no process id")
    return process.pid
