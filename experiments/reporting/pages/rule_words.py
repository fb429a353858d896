"""The rule of a verdict in words, for people who do not read its JSON."""

from collections.abc import Mapping
from typing import Any

from experiments.design.metrics import METRICS
from experiments.reporting import wording


def rule_in_words(rule: Mapping[str, Any]) -> str:
    """Return what the rule asks for, in sentences."""
    primary, metric = rule["primary"], METRICS[rule["primary"]["metric"]]
    blocks = wording.counted(rule["blocks"], "block")
    return " ".join(
        (
            _decides(primary, metric.label, metric.decides == "exact", blocks),
            *_other_work(rule["comparison"]),
            *_slices(rule["estimator"].get("slice", 0)),
            *_requirements(rule["require"]),
        )
    )


def _decides(primary: Mapping[str, Any], label: str, exact: bool, blocks: str) -> str:
    margin, adopt = (wording.plain_percent(primary[name]) for name in ("margin_pct", "adopt_if_pct"))
    how = "by its values, which every repeat must give again" if exact else "by t tests over the differences of blocks"
    within = f"within {margin} counts as the same" if primary["margin_pct"] else "any change counts"
    return (
        f"{label[:1].upper()}{label[1:]} decides over {blocks}, {how}; {within}, and a variant is adopted from {adopt} "
        "improvement on, if it meets every requirement."
    )


def _other_work(comparison: Mapping[str, Any]) -> list[str]:
    if "other_work" not in comparison:
        return []
    return ["A variant whose steps do other work gets no word by a metric that counts whole steps."]


def _slices(steps: int) -> list[str]:
    if not steps:
        return []
    told = wording.counted(steps, "timed step")
    return [f"The trials of a block run by turns, {told} at a time, so that what drifts within seconds is shared."]


def _requirements(required: list[Mapping[str, Any]]) -> list[str]:
    return [f"Required: {METRICS[one['metric']].label} {_bound(one)}." for one in required]


def _bound(one: Mapping[str, Any]) -> str:
    unit = METRICS[one["metric"]].unit
    if "max_value" in one:
        return f"at most {wording.number(one['max_value'])} {unit}"
    if "max_delta" in one:
        return f"at most {wording.number(one['max_delta'])} {unit} above the baseline's"
    return {
        "identical": "the same as the baseline's, bit for bit",
        "envelope": "within the spread of the baseline's repeats",
        "as_claimed": "as the gates claim",
    }[one["rule"]]
