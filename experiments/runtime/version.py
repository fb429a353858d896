"""The version of what is installed."""

import sys
from importlib.metadata import version


def print_version() -> None:
    """Print the version in one line."""
    sys.stdout.write(f"ablate {version('ablate')}\n")
