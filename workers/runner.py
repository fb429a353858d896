"""Run one trainer process to its end, whatever end that is, and prove that nothing of it is left."""

import logging
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from workers.errors import WorkerError
from workers.failures import TOO_LATE, kernel_oom_kills
from workers.forkserver import ForkServer
from workers.guardian import Guardian, end_trial
from workers.lease import Lease, StopReason
from workers.result import TrialOrder
from workers.wake_event import WakeEvent

_log = logging.getLogger(__name__)

_SAMPLE_S = 0.5
"""Between looks at the trial's peak resident set, in case the kernel kills it."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a trainer process ended."""

    stopped: StopReason | None
    """Set when we stopped it."""
    exit_code: int
    wall_s: float
    """From the order to the end of the process."""
    oom_kills: int
    """Kernel out-of-memory kills meanwhile, of any process."""
    peak_rss_bytes: int | None
    """Highest resident set that was seen, sampled."""
    survivors: tuple[int, ...]
    """Processes that even SIGKILL did not end."""


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
    ) -> None:
        self.server = server
        self._guardian = guardian
        self._wake_event = wake_event
        self._grace_s = grace_s
        self._preempted = preempted

    def guard_until(self, boot_time_s: float) -> None:
        """Tell the guardian until when trials may run; infinity when none runs."""
        self._guardian.until(boot_time_s)

    def check_guardian(self) -> None:
        """Make sure that a guardian is there. Raises OSError when none can be started."""
        self._guardian.check()

    def run(self, order: TrialOrder, lease: Lease, *, timeout_s: float) -> Ending:
        """Run `order` until it ends, its time is up, or the lease, the service or our own end stops it."""
        oom_before, start = kernel_oom_kills(), time.monotonic()
        process = self.server.start(replace(order, start_by=lease.until))
        pid = _pid(process)
        self._guardian.watch(pid, order.trial_id)
        try:
            stopped, peak = self._wait(process.sentinel, pid, lease, deadline=start + timeout_s)
            survivors = self._end(process.sentinel, pid, order.trial_id, stopped)
            process.join(0 if survivors else None)
            wall_s = time.monotonic() - start
        except BaseException:
            end_trial(pid, trial_id=order.trial_id, grace_s=0, leader=lambda: not _is_readable(process.sentinel))
            raise
        finally:
            self._guardian.forget(pid, order.trial_id)
        exit_code = process.exitcode if process.exitcode is not None else -signal.SIGKILL
        return Ending(
            stopped=stopped or _fenced(exit_code, lease),
            exit_code=exit_code,
            wall_s=wall_s,
            oom_kills=kernel_oom_kills() - oom_before,
            peak_rss_bytes=peak,
            survivors=survivors,
        )

    def _wait(self, sentinel: int, pid: int, lease: Lease, *, deadline: float) -> tuple[StopReason | None, int | None]:
        """Return why the trial has to stop, or None when it ended by itself, and its peak resident set."""
        peak: int | None = None
        while True:
            reason = self._reason(lease, deadline)
            if reason is not None:
                return reason, peak
            patience = min(_SAMPLE_S, deadline - time.monotonic(), lease.left_s())
            self._wake_event.wait(patience, also=[sentinel])
            with suppress(OSError):  # without a guardian the kernel's death signal remains, and no block is claimed
                self._guardian.check()
            if _is_readable(sentinel):
                return None, peak
            peak = _peak_rss(pid) or peak

    def _reason(self, lease: Lease, deadline: float) -> StopReason | None:
        reason = lease.reason()
        if reason is not None:
            return reason
        if self._preempted():
            return StopReason.PREEMPTED
        return StopReason.TIMEOUT if time.monotonic() >= deadline else None

    def _end(self, sentinel: int, pid: int, trial_id: str, stopped: StopReason | None) -> tuple[int, ...]:
        """Stop what is left of a trial: all of it, or only children that outlived a trial that ended by itself."""
        grace_s = 0.0 if stopped in (None, StopReason.FENCED) else self._grace_s
        survivors = end_trial(pid, trial_id=trial_id, grace_s=grace_s, leader=lambda: not _is_readable(sentinel))
        if survivors:
            _log.error("trial %s: processes %s survived SIGKILL", trial_id, list(survivors))
        return survivors


def _fenced(exit_code: int, lease: Lease) -> StopReason | None:
    """Tell whether a trial that we did not stop was ended because the lease is over: by the guardian, or by itself."""
    over = lease.reason() is StopReason.FENCED
    return StopReason.FENCED if over and exit_code in (-signal.SIGKILL, TOO_LATE) else None


def _is_readable(descriptor: int) -> bool:
    return bool(wait([descriptor], 0))


def _peak_rss(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _pid(process: ForkServerProcess) -> int:
    if process.pid is None:
        raise WorkerError("the fork server gave a trial no process id")
    return process.pid
