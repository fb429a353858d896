"""The clocks of a receipt: whether its durations fit into one another.

Every step carries its seconds and the moments of its begin and end, by one clock. So seconds cannot be edited alone,
steps cannot overlap, and between two timed steps there is only what the loop itself does: a line of log, a look at the
device's clock. How long that takes is the machine's affair: on busy cores any of these pauses may be long. An edit that
makes the window shorter and leaves the ends of its steps makes all of them long, the shortest too. Between slices the
other trials of the block run: what fills those pauses, their receipts say (receipt_slices).
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise

from experiments.records.receipts import Receipt
from model.config import StepsConfig
from model.measurements import Step

ROUNDING_S = 1e-6
"""Durations are differences of floating-point seconds."""
MAX_GAP_S = 1e-3
MAX_GAP_SHARE = 0.01
"""The pause between two timed steps is at most `MAX_GAP_S` and this share of the median step: the first quartile of
the pauses, or their median in receipts of earlier code, which do not say when a step began."""


def clock_problems(receipt: Receipt, steps: StepsConfig) -> list[str]:
    """Return which durations of a measured trial contradict each other, in sentences."""
    return [
        *_step_problems(receipt),
        *_pause_problems(receipt, steps),
        *_warmup_problems(receipt, steps),
        *_waiting_problems(receipt, steps),
        *_total_problems(receipt),
    ]


def start_problems(receipt: Receipt) -> Iterator[str]:
    """Find a start that is no moment in time."""
    try:
        aware = datetime.fromisoformat(receipt.started_at).utcoffset() is not None
    except ValueError:
        aware = False
    if not aware:
        yield f"started_at is {receipt.started_at!r}; expected a date and time with its offset"


def _step_problems(receipt: Receipt) -> Iterator[str]:
    """Find a step whose seconds are not those between its begin and its end, or that began before another had ended."""
    told = [step.began_s is not None for step in receipt.steps]
    if any(told) != all(told):
        yield f"{sum(told)} of {len(told)} steps say when they began"
    before = receipt.compile_s
    for step in receipt.steps:
        since = step.ended_s - max(before, _began(step))
        if abs(step.ended_s - _began(step) - step.seconds) > ROUNDING_S or since < step.seconds - ROUNDING_S:
            yield f"step {step.index} took {step.seconds:.6g} s; the clock gives it {since:.6g} s"
            return
        before = step.ended_s


def _began(step: Step) -> float:
    return step.ended_s - step.seconds if step.began_s is None else step.began_s


def pauses(timed: Sequence[Step]) -> list[float]:
    """Return the seconds between each timed step and the one before it."""
    return [later.ended_s - earlier.ended_s - later.seconds for earlier, later in pairwise(timed)]


def slices_of(receipt: Receipt, steps: StepsConfig) -> list[tuple[Step, ...]]:
    """Return the timed steps of a trial, those together that ran in one go."""
    by_index = {step.index: step for step in receipt.steps if step.phase == "timed"}
    return [tuple(by_index[index] for index in part if index in by_index) for part in steps.slices]


def _pause_problems(receipt: Receipt, steps: StepsConfig) -> Iterator[str]:
    timed = [step for step in receipt.steps if step.phase == "timed"]
    found = sorted(pause for part in slices_of(receipt, steps) for pause in pauses(part))
    if not found:
        return
    older, step_s = timed[0].began_s is None, statistics.median(step.seconds for step in timed)
    pause, which = (statistics.median(found), "median") if older else (found[len(found) // 4], "first quartile")
    if pause > MAX_GAP_S + MAX_GAP_SHARE * step_s:
        beside = f"beside steps of {step_s:.3g} s: their seconds are short"
        yield f"between timed steps {pause:.3g} s pass ({which}) {beside}"


def _warmup_problems(receipt: Receipt, steps: StepsConfig) -> Iterator[str]:
    """Find missing load, which lies between step 0 and step 1."""
    if any(not (math.isfinite(seconds) and seconds > 0) for seconds in receipt.warmup_passes):
        yield "a warm-up pass has no positive duration"
    if len(receipt.steps) < 2:
        return
    first, second = receipt.steps[:2]
    load = _began(second) - first.ended_s
    if load < steps.warmup_s - ROUNDING_S:
        yield f"{load:.3g} s lie between step 0 and step 1; the configuration asks for {steps.warmup_s:g} s of load"
    if steps.warmup_s and not receipt.warmup_passes:
        yield f"no warm-up pass; the configuration asks for {steps.warmup_s:g} s of load"


def _waiting_problems(receipt: Receipt, steps: StepsConfig) -> Iterator[str]:
    if (receipt.waited_s is not None) != (steps.slice > 0):
        told = "is absent" if receipt.waited_s is None else f"is {receipt.waited_s:.6g}"
        yield f"waited_s {told}; the configuration asks for slices of {steps.slice} steps"
    if receipt.waited_s is not None and receipt.waited_s < 0:
        yield f"waited_s is {receipt.waited_s:.6g}, less than nothing"
    if steps.slice and receipt.training_began_s is None:
        yield "training_began_s is absent: nobody can tell whether the slices of the block alternated"


def _total_problems(receipt: Receipt) -> Iterator[str]:
    spent = math.fsum([receipt.compile_s, *receipt.warmup_passes, *(step.seconds for step in receipt.steps)])
    ended = receipt.steps[-1].ended_s - (receipt.waited_s or 0.0) if receipt.steps else 0.0
    for name, part, whole_name, whole in (
        ("steps and passes", spent, "training_s", receipt.training_s),
        ("the last step's end", ended, "training_s", receipt.training_s),
        ("training_s", receipt.training_s, "wall_s", receipt.wall_s),
    ):
        if part > whole + ROUNDING_S:
            yield f"{name} come to {part:.6g} s; {whole_name} is {whole:.6g}"
