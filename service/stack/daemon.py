"""`python -m service.stack.daemon`: the supervisor in the background; tells its starter how the start goes.

Progress goes to standard output as JSON lines until the stack is ready or has failed; then nothing more is written.
"""

import json
import logging
import os
import sys

from service.settings import get_client_settings
from service.stack.errors import StackBusy
from service.stack.layout import StackFiles
from service.stack.supervisor import supervise


def main() -> int:
    """Supervise the stack of $ABLATE_HOME; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        supervise(StackFiles(home=get_client_settings().home), _report)
    except StackBusy as error:
        _report("busy", str(error))
        return 1
    except Exception as error:  # the task boundary: whoever started us hears it, and the log keeps the traceback
        logging.getLogger(__name__).exception("the stack did not start")
        _report("failed", str(error))
        return 1
    return 0


def _report(kind: str, text: str) -> None:
    try:
        sys.stdout.write(json.dumps({"kind": kind, "text": text}) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the starter went away; the stack goes on
        kind = "ready"
    if kind == "ready":
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
