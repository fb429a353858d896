"""`python -m workers.execute PLAN --out BUNDLE`: run a plan file without a service; the program behind `ablate exec`.

Nothing heavy is imported at module level: a process forked for a trial imports its parent's main module again.
"""


def main() -> None:
    """Run the command of this process's arguments and end the process."""
    import sys

    import typer

    from workers.exec_cli import run

    program = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    program.command()(run)
    program(prog_name="ablate exec", args=sys.argv[1:])


if __name__ == "__main__":
    main()
