"""`python -m workers.offline PLAN --out BUNDLE`: run a plan file without a service; the program behind `ablate exec`.

Trials are forked from a server that does not import a package's main module again, so this costs them nothing.
"""

import sys

import typer

from experiments.runtime.command_groups import SingleCommand
from workers.offline.cli import run


def main() -> None:
    """Run the command of this process's arguments and end the process."""
    program = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    program.command(cls=SingleCommand)(run)
    program(prog_name="ablate exec", args=sys.argv[1:])


if __name__ == "__main__":
    main()
