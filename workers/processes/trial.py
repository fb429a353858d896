"""The trainer's side of a trial: a fresh process, forked from a server that has torch imported.

This module imports torch only inside functions, because the worker itself imports it, too, and needs no torch.
"""

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ablate.experiments.documents import write_whole
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.system.isolation import use_temporary
from ablate.experiments.system.kernel_limits import enclose, own_ipc
from ablate.experiments.system.processes import adopt_orphans, die_with_parent
from ablate.workers.built_in import training
from ablate.workers.built_in.rank_group import run_ranks
from ablate.workers.commands.code_copy import copy_code
from ablate.workers.commands.program import run_program
from ablate.workers.commands.several_nodes import run_on_nodes
from ablate.workers.devices.device_lock import TRAINER_PATIENCE_S, DeviceLock
from ablate.workers.isolation.environment import mark_process, use_environment
from ablate.workers.lease import boot_time_s
from ablate.workers.paths import limit_files
from ablate.workers.trials.failures import CANNOT_WRITE, TOO_LATE, describe
from ablate.workers.trials.result import TrialOrder, TrialResult


def main(order: TrialOrder) -> None:
    """Run one trial and write its result file; exit with `CANNOT_WRITE` when that fails."""
    try:
        _run(order)
    except OSError:
        os._exit(CANNOT_WRITE)


def _run(order: TrialOrder) -> None:
    """Write the result file of a trial. It contains the class of any exception from its work."""
    _detach(order)
    limit_files(None if order.prepare_only else order.most_bytes)  # a dataset may be large
    target = order.paths.prepared if order.prepare_only else order.paths.result
    lock = DeviceLock(order.locks)  # released by the end of this process
    try:
        lock.take(patience_s=TRAINER_PATIENCE_S)
        use_temporary(order.paths.temporary)
        ranks = training.ranks_of(order)
        result = _work(order) if ranks == 1 else _run_ranks(order, ranks)
        content = result.model_dump_json()
    except Exception as error:  # the task boundary: the result file records it
        content = _failure_of(order, error).model_dump_json()
    sys.stdout.flush()
    sys.stderr.flush()
    order.paths.make_room(target)
    write_whole(target, content)


def _detach(order: TrialOrder) -> None:
    """Start an own session and group, die with the parent, write output to the trial's log, read no input."""
    os.setsid()
    _die_with_the_worker()
    adopt_orphans()
    own_ipc()
    if boot_time_s() > order.start_by:
        os._exit(TOO_LATE)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the fork server's handler ends all trials
    mark_process(order.trial_id)
    _offer_to_oom_killer()
    log = os.open(order.paths.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    empty = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((empty, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(empty)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _offer_to_oom_killer() -> None:
    """Let the kernel end this trial rather than the worker or the service when memory runs out."""
    with suppress(OSError):  # a system without the file ends the process that uses most
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _die_with_the_worker() -> None:
    """End with the fork server, which ends with the worker; end at once if either is already gone.

    A server that lost its worker while it imported torch still starts the trial that was ordered before.
    """
    preload = sys.modules.get("ablate.workers.processes.preload")  # inherited; missing if its import failed
    die_with_parent(parent=None if preload is None else preload.SERVER_PID)
    worker = multiprocessing.parent_process()
    if worker is not None and not worker.is_alive():
        os._exit(1)


def _run_ranks(order: TrialOrder, ranks: int) -> TrialResult:
    if order.isolation is not None:
        order.isolation.enter_tree(alone=False)
        enclose()  # each rank isolates itself, because only a process itself may reset the peak of its memory
    return run_ranks(ranks, partial(_run_rank, order), order.paths.folder)


def _run_rank(order: TrialOrder, rank: int) -> TrialResult:
    """Return the result of one of several ranks. It contains the class of any exception from its work."""
    try:
        _isolate(order, alone=False)
        return training.run_rank(order, rank)
    except Exception as error:  # the boundary of a rank, as that of a task
        return _failure_of(order, error)


def _failure_of(order: TrialOrder, error: Exception) -> TrialResult:
    """Print the traceback of an exception that ended a process; return the result that names it."""
    failure, message = describe(error, most_bytes=order.most_bytes)
    limit_files(None)  # the traceback and the result still have to be written
    traceback.print_exc()
    peaks = _gpu_peaks() if failure is FailureClass.OOM and not isinstance(error, MemoryError) else {}
    return TrialResult.partial(failure_class=failure, message=message, **peaks)


def _gpu_peaks() -> dict[str, int]:
    """Return the peaks of this process's memory on its GPU in bytes; empty where it used none."""
    torch = sys.modules.get("torch")  # a process that did not import it had no tensors
    if torch is None or not torch.cuda.is_initialized():
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved}


def _isolate(order: TrialOrder, *, alone: bool = True) -> None:
    if order.isolation is not None:
        order.isolation.enter(alone=alone)  # after the locks, which are sockets
    use_environment(order.environment)


def _work(order: TrialOrder) -> TrialResult:
    task = _TASKS[order.config.own_process]
    if order.nodes > 1 and not order.prepare_only:
        return run_on_nodes(order)  # its part on each node isolates itself
    _isolate(order)
    return task.prepare(order) if order.prepare_only else task.run(order)


class _Task(NamedTuple):
    """Work of a trial's process for one kind of workload."""

    prepare: Callable[[TrialOrder], TrialResult]
    run: Callable[[TrialOrder], TrialResult]


_TASKS = {
    False: _Task(prepare=training.prepare_data, run=training.run_model),
    True: _Task(prepare=copy_code, run=run_program),
}
"""By whether the workload is a program of its own."""
