"""`python -m ablate.workers.offline PLAN --out BUNDLE`: run a plan file without a service.

This is the program behind `ablate offline exec`. The fork server does not import a package's main module again, so
trials do not pay for these imports.
"""

import sys

import typer

from ablate.experiments.system.console import SingleCommand
from ablate.workers.offline.cli import run


def main() -> None:
    """Run the command with this process's arguments and exit."""
    program = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    program.command(cls=SingleCommand)(run)
    program(prog_name="ablate offline exec", args=sys.argv[1:])


if __name__ == "__main__":
    main()
