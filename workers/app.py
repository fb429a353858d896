"""`python -m ablate.workers.app`: run a worker.

This module imports nothing heavy: every trial is forked, and imports the main module of its parent again.
"""

import sys


def main() -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    from ablate.workers.serve import serve

    return serve()


if __name__ == "__main__":
    sys.exit(main())
