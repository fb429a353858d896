"""Run the trials of one block by turns: every trainer stays in memory, and one of them runs at any moment.

A trainer starts and warms up while those before it wait. When the last one waits, slices of timed steps follow each
other (ablate.experiments.design.arms). Then each trainer ends while the rest wait. A waiting trainer is blocked on a
pipe, over which each side sends one byte: "I wait" from the trainer, "go on" from the worker. When a trainer ends
early, its slices are left out and the others go on.

A program without marked steps has no slices: its trial waits each time that its turn is over by the clock.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.connection import Connection

from ablate.experiments.design.plan import running_order
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.system.processes import family_of, send
from ablate.workers.devices.device_lock import TRAINER_PATIENCE_S, DeviceLock
from ablate.workers.errors import BlockBroken, DeviceBusy
from ablate.workers.lease import Lease
from ablate.workers.processes.runner import Ending, RunningTrial, TrialRunner
from ablate.workers.trials.result import TrialOrder
from ablate.workers.trials.turns import PIPE_BYTE

_READ_BYTES = 65_536
"""A trainer that writes more than one byte waits once."""


@dataclass(frozen=True, kw_only=True)
class SlicedTrial:
    """One trial of a block that runs in slices."""

    order: TrialOrder
    timeout_s: float
    """Of its own running time; waiting for the others does not count."""
    began: Callable[[], None]
    """Called just before its process is started."""
    goes_on: Callable[[], None]
    """Called whenever it becomes the running trial."""
    ended: Callable[[Ending], None]
    """Called once; an exception from it ends every trainer."""


@dataclass(kw_only=True)
class _Resident:
    """A trainer in memory."""

    trial: SlicedTrial
    running: RunningTrial
    pipe: Connection


class SlicedBlock:
    """Runs the trainers of one block."""

    def __init__(self, runner: TrialRunner, lease: Lease) -> None:
        self._runner = runner
        self._lease = lease
        self._residents: list[_Resident] = []

    @property
    def pids(self) -> frozenset[int]:
        """The processes of the trials that have not ended."""
        trainers = [resident.running.pid for resident in self._residents if not resident.running.over]
        return frozenset(pid for trainer in trainers for pid in family_of(trainer))

    def run(self, trials: Sequence[SlicedTrial], *, slices: int | None) -> None:
        """Run `trials` to their ends, each with this many slices; None: in turns until all have ended.

        Raises BlockBroken when another trainer of this machine uses the device.
        """
        with _locked(trials[0].order.locks) as lock, ExitStack() as stack:
            try:
                for trial in trials:
                    self._residents.append(stack.enter_context(self._resident(trial, lock)))
                    self._advance(self._residents[-1])
                begun = len(trials) if slices is None else 0  # the start is a turn by the clock, and no slice
                for _number, resident in islice(running_order(self._residents, slices), begun, None):
                    if all(one.running.over for one in self._residents):
                        break
                    self._let_run(resident)
                for resident in self._residents:
                    self._let_run(resident)
            except BaseException:
                self._kill()
                raise

    @contextmanager
    def _resident(self, trial: SlicedTrial, lock: DeviceLock) -> Iterator[_Resident]:
        ours, theirs = multiprocessing.Pipe()
        with ours, theirs:
            order = replace(trial.order, locks=(), lock_sockets=lock.sockets, slice_pipe=theirs)
            trial.began()
            with self._runner.started(order, self._lease, timeout_s=trial.timeout_s) as running:
                theirs.close()  # the pipe then ends together with the process
                yield _Resident(trial=trial, running=running, pipe=ours)

    def _let_run(self, resident: _Resident) -> None:
        if not resident.running.over:
            resident.running.let_go_on()
            with suppress(OSError):  # a dead trainer shows by its end
                os.write(resident.pipe.fileno(), PIPE_BYTE)
            self._advance(resident)

    def _advance(self, resident: _Resident) -> None:
        """Follow a trainer until it waits or has ended."""
        running = resident.running
        resident.trial.goes_on()
        self._runner.follow(running, self._lease, until=resident.pipe)
        if running.stopped is None and _waits(resident.pipe):
            return
        if running.stopped is None:  # its pipe has ended, and so does the process
            self._runner.follow(running, self._lease)
        resident.trial.ended(self._runner.end(running, self._lease))

    def _kill(self) -> None:
        """Kill all trainers at once, before each is cleaned up one by one: the lease may be over."""
        residents = [resident.running for resident in self._residents]
        send([running.pid for running in residents if not running.over and running.lives], signal.SIGKILL)


def _waits(trainer: Connection) -> bool:
    """Read the trainer's byte; return whether it waits. False when it is gone or has sent nothing."""
    try:
        return trainer.poll() and bool(os.read(trainer.fileno(), _READ_BYTES))
    except OSError:
        return False


@contextmanager
def _locked(addresses: Sequence[str]) -> Iterator[DeviceLock]:
    """Take the trainers' device locks; all trainers of the block inherit them."""
    lock = DeviceLock(addresses)
    try:
        lock.take(patience_s=TRAINER_PATIENCE_S)
        yield lock
    except DeviceBusy as error:
        raise BlockBroken(FailureClass.INFRA_NODE, str(error)) from error
    finally:
        lock.release()
