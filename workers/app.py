"""`python -m workers.app`: run a worker.

Nothing heavy is imported at module level: a process forked for a trial imports its parent's main module again.
"""

import sys


def main() -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    from workers.leases.serve import serve

    return serve()


if __name__ == "__main__":
    sys.exit(main())
