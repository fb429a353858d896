"""Decisions as exit codes, and the option that requires one."""

from typing import TYPE_CHECKING, Annotated

import typer

from experiments.outcomes import EXIT_CODES, Decision, ExitCode

if TYPE_CHECKING:
    from experiments.analysis.verdicts import VariantVerdict

RequireOption = Annotated[Decision | None, typer.Option(help="Exit with 0 only when every variant has this decision.")]


def exit_code(variants: "tuple[VariantVerdict, ...]", require: Decision | None) -> ExitCode:
    """Return the exit code of `verdict`."""
    decisions = [variant.decision for variant in variants]
    if require is not None:
        others = [EXIT_CODES[decision] for decision in decisions if decision is not require]
        return (max(others) or ExitCode.UNMET) if others else ExitCode.DONE
    if Decision.ADOPT in decisions:
        return ExitCode.DONE
    return max((EXIT_CODES[decision] for decision in decisions), default=ExitCode.ERROR)
