"""Slices: the trials of a block, in memory together, run their timed steps by turns, and only one runs at any moment.

Which slice follows which is declared here, for the worker that runs them and for whoever checks the receipts.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from experiments.design.problems import listed, pointer
from experiments.design.spec import AblationSpec
from experiments.errors import SpecProblem
from kernels.backends import NODE_CLASSES, NodeClass

MAX_TRIALS = 8
"""Arms of an ablation with slices: all trials of a block are in the machine's memory at the same time."""

Trial = TypeVar("Trial")


def running_order(trials: Sequence[Trial], slices: int) -> Iterator[tuple[int, Trial]]:
    """Yield (number of the slice, trial) in the order of running: through the block's order, then back, and so on.

    A drift that is linear in time adds the same to every trial after any even number of slices.
    """
    for number in range(slices):
        for trial in trials if number % 2 == 0 else reversed(trials):
            yield number, trial


def slice_problems(spec: AblationSpec, node_class: NodeClass) -> Iterator[SpecProblem]:
    """Find why the trials of `spec` cannot run in slices, if that is asked for."""
    steps, arms = spec.workload.steps, 1 + len(spec.variants)
    if not steps.slice:
        return
    where = pointer("workload", "steps", "slice")
    if not node_class.slices:
        able = listed(name for name, entry in NODE_CLASSES.items() if entry.slices)
        detail = f"the trials of a block cannot run in slices on node class '{node_class}': {_why_not(node_class)}"
        yield SpecProblem(pointer=where, detail=detail, hint=f"node classes that can: {able}; or leave slice out")
    if spec.placement.devices > 1:
        detail = f"slices are for trials on one device; {spec.placement.devices} were asked for"
        yield SpecProblem(pointer=where, detail=detail, hint="leave slice out, or use one device")
    if arms > MAX_TRIALS:
        detail = f"{arms} arms would be in memory together; with slices allowed: {MAX_TRIALS}, the baseline among them"
        yield SpecProblem(pointer=where, detail=detail, hint="leave slice out, or ask about fewer variants")
    if steps.timed % (2 * steps.slice):
        detail = f"{steps.timed} timed steps are no even number of slices of {steps.slice}"
        fitting = [size for size in range(1, steps.timed // 2 + 1) if steps.timed % (2 * size) == 0]
        hint = f"slices that fit: {listed(map(str, fitting))}" if fitting else "use an even number of timed steps"
        yield SpecProblem(pointer=where, detail=detail, hint=hint)


def _why_not(node_class: NodeClass) -> str:
    if node_class.compiles_only:
        return "nothing is executed there"
    return "a trial has the device to itself there, and any other process on it makes the trial invalid"
