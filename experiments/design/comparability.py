"""Whether two arms can be compared: in what their work differs, and in what their numerical model.

An arm that does half the work of a step takes less memory and less time for it, which is no improvement. A metric says
what must be alike (`Metric.alike`); here is said whether it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.design.fields import read_config
from experiments.design.gate import Claim, show
from experiments.design.gates import GATES
from model.counts import step_flops
from model.measurements import Metric


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one training step does."""

    tokens: int
    flops: int
    """Model FLOPs, forward and backward."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Work":
        """Return the work of the configuration of an arm, which has no seed."""
        typed = read_config({"seed": 0, **config}, may_be_older=True)
        return cls(tokens=typed.tokens_per_step, flops=step_flops(typed))


def other_work(metric: Metric, own: Mapping[str, Any], base: Mapping[str, Any]) -> str | None:
    """Return in what the work of the configuration `own` differs from that of `base`, in words.

    None where all is alike that `metric` counts, so that like is compared with like.
    """
    mine, theirs = Work.of(own), Work.of(base)
    if metric.alike == "step" and mine.tokens != theirs.tokens:
        return f"a step has {mine.tokens:,} tokens, the baseline's {theirs.tokens:,}"
    if metric.alike != "nothing" and mine.flops * theirs.tokens != theirs.flops * mine.tokens:
        per_token = (f"{work.flops / work.tokens:,.0f}" for work in (mine, theirs))
        return "a token takes {} model FLOPs, the baseline's {}".format(*per_token)
    return None


def other_model(own: Mapping[str, Any], base: Mapping[str, Any]) -> str | None:
    """Return in which gates that change the numerical model the gates `own` differ from `base`, in words."""
    changed = [
        f"{name} {show(value)} instead of {show(base[name])}"
        for name, value in own.items()
        if value != base[name] and GATES[name].claim is Claim.CHANGES_MODEL
    ]
    return ", ".join(changed) or None
