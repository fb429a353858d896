"""Trials that have run while their block goes on: a block hands in all of them together, at its end."""

from collections.abc import Iterable

from experiments.outcomes import TrialState
from service.schemas.ablations import TrialPublic

RAN = "ran"
"""How people are told of them; for the service they run until their block is handed in."""


def have_run(trials: Iterable[TrialPublic]) -> set[str]:
    """Return the ids of the trials that did all their steps before another one of their block began."""
    running = [one for one in trials if one.state is TrialState.RUNNING]
    newest = {one.block_index: max(o.position for o in running if o.block_index == one.block_index) for one in running}
    return {one.id for one in running if one.position < newest[one.block_index] and _did_its_steps(one)}


def _did_its_steps(one: TrialPublic) -> bool:
    """Tell whether a trial said so; of its last step it may have had no time to tell."""
    told = one.progress
    return told is not None and told.steps_total is not None and told.steps_done >= told.steps_total - 1
