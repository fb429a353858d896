"""The `ablate` program. Its version is said before anything is imported that commands need."""

import sys

from experiments.runtime.version import print_version


def main() -> None:
    """Run the program with the arguments of this process."""
    if sys.argv[1:] == ["--version"]:
        print_version()
        return
    from experiments.runtime import groups  # with all that declares commands

    groups.run()
