"""A worker whose fork server starts slowly; a trial that it ordered before writes a result if it survives."""

import os
import sys
from multiprocessing import forkserver
from pathlib import Path

from ablate.workers.processes import trial
from ablate.workers.processes.forkserver import ForkServer
from ablate.workers.trials.result import TrialOrder
from tests.integration.worker_family import order


def late(order: TrialOrder) -> None:
    """Do the first step of a trial, then write a result."""
    trial._die_with_the_worker()
    order.paths.result.write_text("ran")


def main() -> None:
    """Start one trial; the test kills this process before the trial has begun, once the request is sent."""
    os.environ["WORKER_OF_THE_TEST"] = str(os.getpid())
    answer_of_the_server = forkserver.read_signed

    def sent(pipe: int) -> int:
        (Path(sys.argv[1]) / "sent").touch()
        return int(answer_of_the_server(pipe))

    forkserver.read_signed = sent
    ForkServer(preload="tests.integration.slow_preload", target=late).start(order(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
