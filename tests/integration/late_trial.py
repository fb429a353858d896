"""A worker whose fork server takes long to start; the trial that is on its way to it writes its result, if it lives."""

import sys
from pathlib import Path

from tests.integration.worker_family import order
from workers.processes import trial
from workers.processes.forkserver import ForkServer
from workers.processes.result import TrialOrder


def late(order: TrialOrder) -> None:
    """Do what a trial does first, then leave a result."""
    trial._die_with_the_worker()
    order.paths.result.write_text("ran")


def main() -> None:
    """Start one trial; somebody kills this process before it has begun."""
    ForkServer(preload="tests.integration.slow_preload", target=late).start(order(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
