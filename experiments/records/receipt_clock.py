"""The clocks of a receipt: whether its durations fit into one another.

Every step carries its seconds and the moment of its end, by the same clock. So steps cannot overlap, and between two
timed steps there is only what the loop itself does: a line of log, a look at the device's clock.
"""

import math
import statistics
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise

from experiments.records.receipts import Receipt
from model.config import StepsConfig

ROUNDING_S = 1e-6
"""Durations are differences of floating-point seconds."""
MAX_GAP_S = 1e-3
MAX_GAP_SHARE = 0.01
"""The median pause between two timed steps is at most `MAX_GAP_S` and this share of the median step."""


def clock_problems(receipt: Receipt, steps: StepsConfig) -> list[str]:
    """Return which durations of a measured trial contradict each other, in sentences."""
    return [
        *_overlaps(receipt),
        *_pause_problems(receipt),
        *_warmup_problems(receipt, steps),
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


def _overlaps(receipt: Receipt) -> Iterator[str]:
    before = receipt.compile_s
    for step in receipt.steps:
        if step.ended_s - before < step.seconds - ROUNDING_S:
            yield f"step {step.index} took {step.seconds:.6g} s; the clock gives it {step.ended_s - before:.6g} s"
            return
        before = step.ended_s


def _pause_problems(receipt: Receipt) -> Iterator[str]:
    timed = [step for step in receipt.steps if step.phase == "timed"]
    pauses = [later.ended_s - earlier.ended_s - later.seconds for earlier, later in pairwise(timed)]
    if not pauses:
        return
    pause, step_s = statistics.median(pauses), statistics.median(step.seconds for step in timed)
    if pause > MAX_GAP_S + MAX_GAP_SHARE * step_s:
        yield f"between timed steps {pause:.3g} s pass (median) beside steps of {step_s:.3g} s: their seconds are short"


def _warmup_problems(receipt: Receipt, steps: StepsConfig) -> Iterator[str]:
    """Find missing load, which lies between step 0 and step 1."""
    if any(not (math.isfinite(seconds) and seconds > 0) for seconds in receipt.warmup_passes):
        yield "a warm-up pass has no positive duration"
    if len(receipt.steps) < 2:
        return
    first, second = receipt.steps[:2]
    load = second.ended_s - second.seconds - first.ended_s
    if load < steps.warmup_s - ROUNDING_S:
        yield f"{load:.3g} s lie between step 0 and step 1; the configuration asks for {steps.warmup_s:g} s of load"
    if steps.warmup_s and not receipt.warmup_passes:
        yield f"no warm-up pass; the configuration asks for {steps.warmup_s:g} s of load"


def _total_problems(receipt: Receipt) -> Iterator[str]:
    spent = math.fsum([receipt.compile_s, *receipt.warmup_passes, *(step.seconds for step in receipt.steps)])
    for name, part, whole_name, whole in (
        ("steps and passes", spent, "training_s", receipt.training_s),
        ("the last step's end", receipt.steps[-1].ended_s if receipt.steps else 0.0, "training_s", receipt.training_s),
        ("training_s", receipt.training_s, "wall_s", receipt.wall_s),
    ):
        if part > whole + ROUNDING_S:
            yield f"{name} come to {part:.6g} s; {whole_name} is {whole:.6g}"
