"""The rule in words, and tables of the circumstances: A/A blocks, broken attempts, earlier askings."""

from collections.abc import Callable, Mapping
from typing import Any

from ablate.experiments.block_numbers import block_number
from ablate.experiments.outcomes import VerdictWord
from ablate.experiments.records.calibration import Calibration
from ablate.experiments.records.circumstances import Circumstances
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.table import Table, codes, numbers, row, texts


def rule_in_words(rule: Mapping[str, Any]) -> str:
    """Return the rule as sentences."""
    primary = rule["primary"]
    blocks = wording.counted(rule["blocks"], "block")
    return " ".join(
        (
            _decides(rule, wording.metric(primary["metric"]) + _target(primary), blocks),
            *_session(rule["comparison"]),
            *_other_work(rule["comparison"]),
            *_turns(rule["estimator"]),
            *_requirements(rule["require"]),
        )
    )


def _target(part: Mapping[str, Any]) -> str:
    return f" of {part['target']}" if "target" in part else ""


def _decides(rule: Mapping[str, Any], label: str, blocks: str) -> str:
    primary = rule["primary"]
    margin, adopt = (_amount(primary, name) for name in ("margin", "adopt_if"))
    exact, over_seeds = "exact" in rule["comparison"], "calibration" in rule["comparison"]
    how = "by t tests on the differences of the seeds" if over_seeds else "by t tests on the block differences"
    if exact:
        how = "by its values, which every repeat must reproduce"
    within = f"A change within {margin} counts as the same." if primary["margin_pct"] else "Any change counts."
    proved = "" if exact else f", is proved to be beyond {margin}"
    return (
        f"{wording.capitalised(label)} decides over {blocks}, {how}. {within} The rule adopts a variant that improves "
        f"by {adopt} or more{proved} and meets every requirement."
    )


def _amount(primary: Mapping[str, Any], name: str) -> str:
    """Return an amount of the rule as in its spec, with its percent of the baseline's mean."""
    percent = wording.plain_percent(primary[f"{name}_pct"])
    return f"{primary[name]} ({percent})" if name in primary else percent


def _session(comparison: Mapping[str, Any]) -> list[str]:
    if "session" not in comparison:
        return []
    own = comparison["session"]
    level = f"a level of {wording.plain_percent(100 * own['level'])}, which the session gave it before the first sample"
    return [f"It is proposal {own['proposal']} of session '{own['name']}', with {level}."]


def _other_work(comparison: Mapping[str, Any]) -> list[str]:
    if "other_work" not in comparison:
        return []
    losses = "A loss compares arms that trained on equal tokens or with equal model FLOPs, and over equal rows."
    steps = "A variant whose steps do other work gets no verdict by a metric that counts whole steps."
    return [steps, losses] if "other_training" in comparison else [steps]


def _turns(estimator: Mapping[str, Any]) -> list[str]:
    if "slice" not in estimator and "turns" not in estimator:
        return []
    turn = wording.counted(estimator["slice"], "timed step") if "slice" in estimator else "half a second"
    return [f"The trials of a block take turns, {turn} at a time, so that they share drift within seconds."]


def _requirements(required: list[Mapping[str, Any]]) -> list[str]:
    return [f"Required: {wording.metric(one['metric'])} {_bound(one)}." for one in required]


def _bound(one: Mapping[str, Any]) -> str:
    unit = wording.unit(one["metric"])
    if "not_worse_by" in one:
        amount = one["not_worse_by"]
        bound = amount if isinstance(amount, str) else f"{wording.number(amount)} {unit}".rstrip()
        return f"proved to be worse than the baseline's by less than {bound}"
    if "max_value" in one:
        return f"at most {wording.number(one['max_value'])} {unit}"
    if "max_delta" in one:
        return f"at most {wording.number(one['max_delta'])} {unit} above the baseline's"
    return {
        "identical": "the same as the baseline's, bit for bit",
        "envelope": "within the spread of the baseline's repeats",
        "as_claimed": "as the gates claim",
    }[one["rule"]]


LONGEST_MESSAGE = 200

NOISE: dict[str, Callable[[Calibration], str]] = {
    "recipe": lambda one: one.key.recipe,
    "A/A blocks": lambda one: f"{one.blocks:,}",
    "sd of the difference from block to block": lambda one: wording.size_percent(one.sd_pct),
    f"sd at most, with 95{wording.SPACE}% confidence": lambda one: wording.size_percent(one.sd_upper_pct),
    "mean difference": lambda one: wording.percent(one.mean_pct),
    "later trial of a block against the earlier": lambda one: wording.percent(one.position_effect_pct),
    "drift": lambda one: wording.drift(one) or wording.NOTHING,
    "autocorrelation from block to block": lambda one: wording.signed(one.autocorrelation),
    "largest deviation, in sd": lambda one: wording.number(one.largest_z, 3),
    "last measured": lambda one: wording.moment(one.measured_at),
    "ablations": lambda one: ", ".join(one.ablations),
    "A/A blocks signed by": lambda one: ", ".join(dict.fromkeys(block.signed_by or "nobody" for block in one.samples)),
    "digest": lambda one: one.digest,
}
"""Heading -> text of a calibration's number."""


def calibrations_table(circumstances: Circumstances) -> Table:
    """Return the A/A evidence for the devices that ran: one column per calibration."""
    calibrations = circumstances.admission.calibrations
    devices = (f"{one.key.device_serial} ({one.key.node_class})" for one in calibrations)
    rows = (row(heading, *map(write, calibrations)) for heading, write in NOISE.items())
    return Table(
        title="A/A evidence: the noise of the devices that ran",
        columns=(*texts("device"), *codes(*devices)),
        rows=tuple(rows) if calibrations else (),
        note="From blocks with two equal arms, measured in the same way.",
    )


def attempts_table(circumstances: Circumstances) -> Table:
    """Return the broken attempts."""
    return Table(
        title="Broken attempts",
        columns=(*texts("block"), *numbers("attempt"), *texts("class", "arm", "message", "node")),
        rows=tuple(
            row(
                str(block_number(one.block_index)),
                str(one.number),
                one.failure_class.value,
                one.arm or "unknown",
                wording.shorten(one.message, LONGEST_MESSAGE),
                one.node,
            )
            for one in circumstances.attempts
        ),
        note="A block runs again as a whole. If an arm may be the cause, its verdict is inconclusive.",
    )


def family_table(circumstances: Circumstances) -> Table:
    """Return the earlier ablations that asked the same question, including cancelled ones."""
    return Table(
        title="The same question, asked before",
        columns=(*codes("ablation"), *texts("name", "state", "created", "asked too", "verdicts")),
        rows=tuple(
            row(
                one.ablation,
                one.name,
                str(one.state),
                wording.moment(one.created_at),
                ", ".join(one.asked),
                ", ".join(f"{arm}: {VerdictWord(word).value}" for arm, word in one.words.items()) or wording.NOTHING,
            )
            for one in circumstances.family.earlier
        ),
        note="A question that is asked often enough gets a false answer by chance. Each asking is therefore tested at "
        f"its own, stricter level, which keeps 5{wording.SPACE}% over all askings. An ablation counts once it ran "
        "anything, even without a valid sample, because its author could see the results. A proposal has the level "
        "that its session gave it instead.",
    )
