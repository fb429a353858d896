"""A trainer with children of its own: one in its group, one that left the group, both deaf to SIGTERM."""

import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

from ablate.experiments.system.processes import adopt_orphans, die_with_parent
from ablate.workers.isolation.environment import mark_process
from ablate.workers.lease import Lease
from ablate.workers.paths import TrialPaths
from ablate.workers.processes.forkserver import ForkServer
from ablate.workers.processes.guardian import Guardian
from ablate.workers.processes.runner import TrialRunner
from ablate.workers.processes.wake_event import WakeEvent
from ablate.workers.trials.result import TrialOrder

_DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"


class ReportingGuardian(Guardian):
    """Creates a file once the guardian watches the trial."""

    def __init__(self, watched: Path) -> None:
        super().__init__()
        self._watched = watched

    def watch(self, pgid: int, trial_id: str) -> None:
        super().watch(pgid, trial_id)
        if "forgets" in sys.argv:
            os.close(forkserver._forkserver._forkserver_alive_fd)
        self._watched.touch()


def server() -> ForkServer:
    """Return a fork server that starts `family` instead of a trial."""
    return ForkServer(preload="tests.integration.adopting_preload", target=family)


def family(order: TrialOrder) -> None:
    import time

    os.setsid()
    die_with_parent()
    adopt_orphans()
    mark_process(order.trial_id)
    near = subprocess.Popen([sys.executable, "-c", _DEAF])
    far = subprocess.Popen([sys.executable, "-c", _DEAF], start_new_session=True)
    pids = [os.getpid(), near.pid, far.pid]
    if order.config.get("bare"):  # without the mark, and its parent has ended
        child = f"subprocess.Popen([sys.executable, '-c', {_DEAF!r}], env={{}}, stdout=2, start_new_session=True)"
        print_pid = f"import subprocess, sys; print({child}.pid)"
        pids.append(int(subprocess.check_output([sys.executable, "-c", print_pid], env={}, start_new_session=True)))
    order.paths.result.write_text(" ".join(map(str, pids)))
    if not order.config.get("leaves"):
        time.sleep(300)
    os._exit(0)


def order(folder: Path, *, leaves: bool = False, bare: bool = False) -> TrialOrder:
    folder.mkdir(exist_ok=True)
    return TrialOrder(
        trial_id=f"trl_{folder.name}",
        config={"leaves": leaves, "bare": bare},
        paths=TrialPaths(folder=folder),
        data_dir=folder,
        device_type="cpu",
    )


def main() -> None:
    """Run a family until the test kills this process."""
    folder = Path(sys.argv[1])
    wake_event = WakeEvent()
    with ReportingGuardian(folder / "watched") as guardian:
        adopts = "adopts" in sys.argv
        if adopts:
            adopt_orphans()
        runner = TrialRunner(server(), guardian, wake_event, grace_s=0.2, preempted=lambda: False, adopts=adopts)
        runner.run(order(folder, bare="bare" in sys.argv), Lease(300.0, sent_at=10**12), timeout_s=300.0)


if __name__ == "__main__":
    main()
