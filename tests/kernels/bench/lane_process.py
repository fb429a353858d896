"""A process for one lane, because the official kernels and ours need two versions of TileLang.

The parent imports neither. It calls one process at a time, so that a timed function has the GPU alone. A call names a
method of work.Worker and its arguments. The answer is the method's value or its error.
"""

import multiprocessing
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from ablate.kernels.backends import Lane
from ablate.kernels.errors import KernelError, KernelUnsupported
from tests.kernels.bench.work import Worker

_END_PATIENCE_S = 10.0


class LaneProcess:
    """One running lane."""

    def __init__(self, lane: Lane, pipe: "Connection[Any, Any]") -> None:
        self.lane = lane
        self._pipe = pipe

    def ask(self, function: str, *arguments: object, **named: object) -> Any:
        """Return the value of the method `function` of work.Worker.

        Raises KernelUnsupported if the lane refuses, KernelError with the end of the message if it fails.
        """
        try:
            self._pipe.send((function, arguments, named))
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise KernelError(f"the process of lane '{self.lane}' ended in {function}") from error
        if kind == "refused":
            raise KernelUnsupported(value)
        if kind == "failed":
            raise KernelError(f"lane '{self.lane}', {function}: {value}")
        return value


@contextmanager
def lane_process(lane: Lane) -> Iterator[LaneProcess]:
    """Run `lane` in a process of its own inside the block. The first call must be `ready`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, lane), daemon=True)
    process.start()
    theirs.close()
    try:
        yield LaneProcess(lane, ours)
    finally:
        ours.close()
        process.join(_END_PATIENCE_S)
        process.terminate()
        process.join()


def _serve(pipe: "Connection[Any, Any]", lane: Lane) -> None:
    """Answer calls until the parent closes the pipe."""
    worker = Worker(lane)
    while True:
        try:
            function, arguments, named = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = ("value", getattr(worker, function)(*arguments, **named))
        except KernelUnsupported as error:
            answer = ("refused", str(error))
        except Exception as error:  # boundary of the process: the parent writes it into the table
            sys.stderr.write(traceback.format_exc())
            answer = ("failed", f"{type(error).__name__}: {str(error)[-600:]}")
        pipe.send(answer)
