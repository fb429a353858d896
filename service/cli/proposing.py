"""Proposals of sessions, as commands and MCP tools send and show them."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.outcomes import ProposalOutcome
from ablate.experiments.system.shell_python import in_shell_python

if TYPE_CHECKING:
    from ablate.service.schemas.sessions import ProposalAccepted, ProposalAnswer, SessionPath
    from ablate.service.schemas.submissions import SpecBody

PROPOSAL = "proposal"
"""Name of the variant of a command."""


def values_of_command(path: "SessionPath", command: Sequence[str]) -> dict[str, Any]:
    """Return the values of the incumbent's spec with the command as its variant. Raises SpecError.

    If code was sent for the session, the variant's is the current folder.
    """
    from ablate.experiments.design.aa_spec import CONTENT_TYPE
    from ablate.experiments.design.arguments import merged_arguments
    from ablate.experiments.design.kinds.program import set_requirements
    from ablate.experiments.design.load import load_values
    from ablate.experiments.design.program_files import ARCHIVE
    from ablate.experiments.outcomes import BASELINE

    values = load_values(path.spec.encode(), CONTENT_TYPE)
    workload: dict[str, Any] = values["workload"]
    shared = workload.get("command")
    if shared is not None and list(command[: len(shared)]) != shared:
        command = in_shell_python(command).argv
    if shared is None or list(command[: len(shared)]) != shared:
        raise SpecError([_other_command(path.name, shared, command)])
    own = (values.get("baseline") or {}).get("args") or ()
    variant: dict[str, Any] = {"args": list(merged_arguments(own, command[len(shared) :]))}
    if isinstance(workload.get("code"), Mapping) and ARCHIVE in workload["code"]:
        variant["code"] = "."
    set_requirements(workload, {arm: (workload, arm) for arm in (BASELINE, PROPOSAL)})
    values["ablation"] = f"{path.name[:50]}-{path.proposals + 1}"
    values["variants"] = {PROPOSAL: variant}
    return values


def noted(body: "SpecBody", note: str) -> "SpecBody":
    """Return the spec with a note among its labels."""
    from ablate.experiments.analysis.proposals import NOTE
    from ablate.experiments.design.aa_spec import CONTENT_TYPE
    from ablate.experiments.design.load import load_values
    from ablate.experiments.design.spec_yaml import spec_yaml

    values = load_values(body.content, body.content_type)
    values["labels"] = {**(values.get("labels") or {}), NOTE: note}
    return replace(body, content=spec_yaml(values), content_type=CONTENT_TYPE)


def _other_command(session: str, shared: list[str] | None, command: Sequence[str]) -> SpecProblem:
    proposed = shlex.join(command)
    if shared is None:
        detail = f"session '{session}' trains a recipe, so a proposal is a spec; given: {proposed}"
        return SpecProblem(pointer="COMMAND", detail=detail, hint=f"begin with: ablate sessions spec {session}")
    detail = f"the command must begin with that of session '{session}': {shlex.join(shared)}; given: {proposed}"
    hint = "arguments that proposals change belong to baseline.args of the spec that opens a session"
    return SpecProblem(pointer="COMMAND", detail=detail, hint=hint)


def heading(accepted: "ProposalAccepted") -> str:
    """Return a line of rich markup: the proposal, what it is compared with, and its level."""
    whom = f"proposal {accepted.incumbent}" if accepted.incumbent else "the session's first baseline"
    level = f"{100 * accepted.level:.2g} %"
    return f"proposal {accepted.number} of {escape(accepted.session)} against {whom}, tested at {level}"


def closing(answer: "ProposalAnswer") -> str:
    """Return a line of rich markup: the outcome, the incumbent, and the level of the next proposal."""
    outcome = answer.outcome or ProposalOutcome.UNDECIDED
    then = "it is the incumbent now" if outcome is ProposalOutcome.KEEP else "the incumbent stays"
    return f"[bold]{outcome}[/]: {then}; the next proposal is tested at {100 * answer.session.next_level:.2g} %"
