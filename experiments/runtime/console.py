"""The `ablate` program. Its version is said before anything is imported that commands need."""

import sys

from experiments.runtime.version import print_version


def main() -> None:
    """Run the program with the arguments of this process."""
    if sys.argv[1:] == ["--version"]:
        print_version()
        return
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # httpx's own command, a fifth of our start
    from experiments.runtime import groups  # with all that declares commands

    groups.run()
