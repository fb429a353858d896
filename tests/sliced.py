"""Receipts of trials that ran in slices, as a perfect worker would have made them."""

import random
from typing import Any

from ablate.experiments.design.plan import BlockPlan, Plan
from ablate.experiments.records.receipts import Receipt
from ablate.model.measurements import Step
from tests.factories import PAUSE_S, make_receipt

HANDOVER_S = 1e-3
"""Between two slices, at least."""


class _Trial:
    """One trial on the block's line of time."""

    def __init__(self, plan: Plan, arm: str, began_s: float) -> None:
        config = plan.arm_by_name[arm].config
        self.tokens = config.tokens_per_step
        self.arm, self.began_s, self.waited_s, self.last_s = arm, began_s, 0.0, began_s
        self.steps: list[Step] = []

    def run(self, now: float, count: int, phase: str, chance: random.Random) -> float:
        """Run `count` steps from `now` on; return when they have ended."""
        for _ in range(count):
            began, seconds = now + PAUSE_S, chance.uniform(0.01, 0.02)
            now = began + seconds
            number = len(self.steps)
            began_s, ended_s = began - self.began_s, now - self.began_s
            values: dict[str, Any] = {"index": number, "phase": phase, "loss": 8.0 - number / 100, "grad_norm": 1.0}
            step = Step(**values, seconds=ended_s - began_s, began_s=began_s, ended_s=ended_s, tokens=self.tokens)
            self.steps.append(step)
        return now

    def goes_on(self, now: float) -> None:
        """Note that it waited until now."""
        self.waited_s += now - self.last_s


def sliced_receipts(plan: Plan, index: int, chance: random.Random, **changes: Any) -> list[Receipt]:
    """Return the receipts of a block of `plan`, whose spec asks for slices, in the block's order."""
    block, now = plan.blocks[index], chance.uniform(0, 1e6)
    steps = plan.baseline.config.steps
    trials = [_Trial(plan, arm, 0.0) for arm in block.order]
    for trial in trials:
        trial.began_s = now = now + chance.uniform(HANDOVER_S, 0.1)
        now = trial.run(now, 1, "compile", chance)
        now = trial.last_s = trial.run(now + steps.warmup_s, steps.warmup, "warmup", chance)
    for number in range(steps.timed // steps.slice):
        for trial in trials[:: -1 if number % 2 else 1]:
            now += chance.uniform(HANDOVER_S, 2 * HANDOVER_S)
            trial.goes_on(now)
            now = trial.last_s = trial.run(now, steps.slice, "timed", chance)
    return [_receipt(plan, block, trial, now + HANDOVER_S * place, **changes) for place, trial in enumerate(trials, 1)]


def _receipt(plan: Plan, block: BlockPlan, trial: _Trial, now: float, **changes: Any) -> Receipt:
    trial.goes_on(now)
    training_s = now - trial.began_s - trial.waited_s + 5e-4
    times = {"training_began_s": trial.began_s, "waited_s": trial.waited_s, "training_s": training_s}
    return make_receipt(plan, block, trial.arm, steps=tuple(trial.steps), wall_s=training_s + 0.1, **times, **changes)
