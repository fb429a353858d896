"""Check the clocks of receipts: durations of one trial, and slices of the trials of a block.

Every step stores its seconds, its start and its end by one clock, so steps that overlap, or whose seconds are not those
of the clock, show a fault of the measurement.

Receipts also store when training began, by a clock that all processes of the machine share. So the steps of all trials
of a block lie on one line, which shows whether its slices ran in their order and alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from ablate.experiments.design.plan import running_order
from ablate.experiments.outcomes import Outcome
from ablate.experiments.records.receipts import Receipt
from ablate.model.config import StepsConfig
from ablate.model.measurements import Step

ROUNDING_S = 1e-6
"""Tolerance for differences of floating-point seconds."""


def clock_problems(receipt: Receipt, steps: StepsConfig) -> list[str]:
    """Describe durations of a measured trial that contradict each other."""
    return [
        *_step_problems(receipt),
        *_validation_problems(receipt),
        *_warmup_problems(receipt, steps),
        *_waiting_problems(receipt, steps),
        *_total_problems(receipt),
    ]


def start_problems(receipt: Receipt) -> Iterator[str]:
    """Check that the start is a date and time with an offset."""
    try:
        aware = datetime.fromisoformat(receipt.started_at).utcoffset() is not None
    except ValueError:
        aware = False
    if not aware:
        yield f"started_at is {receipt.started_at!r}; expected a date and time with its offset"


def _step_problems(receipt: Receipt) -> Iterator[str]:
    """Find a step whose seconds do not fit its start and end, or that overlaps the step before."""
    before = receipt.compile_s
    for step in receipt.steps:
        since = step.ended_s - max(before, step.began_s)
        if abs(step.ended_s - step.began_s - step.seconds) > ROUNDING_S or since < step.seconds - ROUNDING_S:
            yield f"step {step.index} took {step.seconds:.6g} s; the clock gives it {since:.6g} s"
            return
        before = step.ended_s


def _validation_problems(receipt: Receipt) -> Iterator[str]:
    """Find a validation that does not lie between its step and the next one."""
    by_index = {step.index: step for step in receipt.steps}
    for one in receipt.validations or ():
        before, after = by_index.get(one.step), by_index.get(one.step + 1)
        begun = before is not None and before.ended_s - ROUNDING_S <= one.began_s < one.ended_s
        if not begun or (after is not None and one.ended_s > after.began_s + ROUNDING_S):
            yield f"the validation after step {one.step} does not lie between that step and the next one"
            return


def slices_of(receipt: Receipt, steps: StepsConfig) -> list[tuple[Step, ...]]:
    """Return the timed steps of a trial, grouped by slice."""
    by_index = {step.index: step for step in receipt.steps if step.phase == "timed"}
    return [tuple(by_index[index] for index in part if index in by_index) for part in steps.slices]


def _warmup_problems(receipt: Receipt, steps: StepsConfig) -> Iterator[str]:
    """Find missing load between step 0 and step 1."""
    if any(not (math.isfinite(seconds) and seconds > 0) for seconds in receipt.warmup_passes):
        yield "a warm-up pass has no positive duration"
    if len(receipt.steps) < 2:
        return
    first, second = receipt.steps[:2]
    load = second.began_s - first.ended_s
    if load < steps.warmup_s - ROUNDING_S:
        yield f"{load:.3g} s pass between step 0 and step 1; the configuration requests {steps.warmup_s:g} s of load"
    if steps.warmup_s and not receipt.warmup_passes:
        yield f"no warm-up pass; the configuration requests {steps.warmup_s:g} s of load"


def _waiting_problems(receipt: Receipt, steps: StepsConfig) -> Iterator[str]:
    if (receipt.waited_s is not None) != (steps.slice > 0):
        value = "absent" if receipt.waited_s is None else f"{receipt.waited_s:.6g}"
        yield f"waited_s is {value}; the configuration requests slices of {steps.slice} steps"
    if receipt.waited_s is not None and receipt.waited_s < 0:
        yield f"waited_s is {receipt.waited_s:.6g}, below 0"
    if steps.slice and receipt.training_began_s is None:
        yield "training_began_s is absent, so the slices of the block cannot be checked"


def _total_problems(receipt: Receipt) -> Iterator[str]:
    validations = receipt.validations or ()
    between = (one.ended_s - one.began_s for one in validations)
    spent = math.fsum([receipt.compile_s, *receipt.warmup_passes, *(step.seconds for step in receipt.steps), *between])
    ended = receipt.steps[-1].ended_s - (receipt.waited_s or 0.0) if receipt.steps else 0.0
    ended = max([ended, *(one.ended_s for one in validations)])
    for name, part, whole_name, whole in (
        ("steps, passes and validations", spent, "training_s", receipt.training_s),
        ("the last step's end", ended, "training_s", receipt.training_s),
        ("training_s", receipt.training_s, "wall_s", receipt.wall_s),
    ):
        if part > whole + ROUNDING_S:
            yield f"{name}: {part:.6g} s; {whole_name} is only {whole:.6g} s"


@dataclass(frozen=True, kw_only=True)
class _Span:
    """A span of a block in which one trainer ran, in seconds of the machine's clock."""

    arm: str
    what: str
    began_s: float
    ended_s: float

    def __str__(self) -> str:
        return f"{self.what} of arm '{self.arm}'"


def slice_problems(receipts: Sequence[Receipt]) -> Iterator[str]:
    """Find contradictions between the slices of a block and the clocks of its measured trials, all or some."""
    measured = [receipt for receipt in receipts if receipt.outcome is Outcome.MEASURED]
    measured.sort(key=lambda receipt: receipt.ids.position)
    configured = [receipt.config.steps for receipt in measured]
    if not any(steps.slice for steps in configured):
        return
    if len(set(configured)) > 1:
        yield "the trials of the block differ in steps or slices"
    elif any(receipt.training_began_s is None for receipt in measured):
        yield "a trial of the block does not say when its training began"
    else:
        yield from _line_problems(measured, configured[0])


def _line_problems(receipts: Sequence[Receipt], steps: StepsConfig) -> Iterator[str]:
    """Compare the order of all spans with the planned order; the first problem names the place."""
    slices = {receipt.arm: _slices(receipt, steps) for receipt in receipts}
    order = running_order([receipt.arm for receipt in receipts], len(steps.slices))
    planned = [_start_up(receipt, steps) for receipt in receipts] + [slices[arm][number] for number, arm in order]
    ran = sorted(planned, key=lambda span: span.began_s)
    for due, span in zip(planned, ran, strict=True):
        if due is not span:
            yield f"{span} ran where {due} was due"
            return
    for earlier, later in pairwise(ran):
        if later.began_s < earlier.ended_s - ROUNDING_S:
            yield f"{later} began {earlier.ended_s - later.began_s:.3g} s before the end of {earlier}"
            return


def _start_up(receipt: Receipt, steps: StepsConfig) -> _Span:
    last = receipt.steps[steps.warmup]
    return _span(receipt, "start and warm-up", 0.0, last.ended_s)


def _slices(receipt: Receipt, steps: StepsConfig) -> list[_Span]:
    parts = slices_of(receipt, steps)
    return [
        _span(receipt, f"slice {number} of {len(parts)}", part[0].began_s, part[-1].ended_s)
        for number, part in enumerate(parts, start=1)
    ]


def _span(receipt: Receipt, what: str, began_s: float, ended_s: float) -> _Span:
    start = receipt.training_began_s or 0.0
    return _Span(arm=receipt.arm, what=what, began_s=start + began_s, ended_s=start + ended_s)
