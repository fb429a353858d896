"""Tables of what a verdict took into account besides its receipts: A/A blocks, broken attempts, earlier askings."""

from collections.abc import Callable, Mapping
from typing import Any

from experiments.block_numbers import block_number
from experiments.design.metrics import METRICS
from experiments.outcomes import VerdictWord
from experiments.records.calibration import Calibration
from experiments.records.circumstances import Circumstances
from experiments.reporting import wording
from experiments.reporting.table import Table, codes, numbers, row, texts


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


LONGEST_MESSAGE = 200


NOISE: dict[str, Callable[[Calibration], str]] = {
    "recipe": lambda found: found.key.recipe,
    "A/A blocks": lambda found: f"{found.blocks:,}",
    "sd of the difference from block to block": lambda found: wording.size_percent(found.sd_pct),
    f"sd at most, with 95{wording.SPACE}% confidence": lambda found: wording.size_percent(found.sd_upper_pct),
    "mean difference": lambda found: wording.percent(found.mean_pct),
    "later trial of a block against the earlier": lambda found: wording.percent(found.position_effect_pct),
    "drift per hour": lambda found: wording.percent(found.drift_pct_per_hour),
    "autocorrelation from block to block": lambda found: wording.signed(found.autocorrelation),
    "largest deviation, in sd": lambda found: wording.number(found.largest_z, 3),
    "last measured": lambda found: wording.moment(found.measured_at),
    "ablations": lambda found: ", ".join(found.ablations),
    "digest": lambda found: found.digest,
}
"""What is said of the noise of a device, and how it is written."""


def calibrations_table(known: Circumstances) -> Table:
    """Return the A/A evidence for the devices that ran: one column for each calibration."""
    calibrations = known.admission.calibrations
    devices = (f"{found.key.device_serial} ({found.key.node_class})" for found in calibrations)
    rows = (row(what, *(write(found) for found in calibrations)) for what, write in NOISE.items())
    return Table(
        title="A/A evidence: the noise of the devices that ran",
        columns=(*texts("device"), *codes(*devices)),
        rows=tuple(rows) if calibrations else (),
        note="From blocks in which both arms were the same, measured on the same path.",
    )


def attempts_table(known: Circumstances) -> Table:
    """Return every attempt at a block that did not count; the verdict takes each into account."""
    return Table(
        title="Attempts that did not count",
        columns=(*texts("block"), *numbers("attempt"), *texts("class", "arm", "message", "node")),
        rows=tuple(
            row(
                str(block_number(one.block_index)),
                str(one.number),
                one.failure_class.value,
                one.arm or "cannot be told",
                wording.shorten(one.message, LONGEST_MESSAGE),
                one.node,
            )
            for one in known.attempts
        ),
        note="A block that broke runs again whole. Where an arm may have caused it, no word is published for that arm.",
    )


def family_table(known: Circumstances) -> Table:
    """Return the earlier ablations that asked the same question, cancelled ones included."""
    return Table(
        title="The same question, asked before",
        columns=(*codes("ablation"), *texts("name", "state", "created", "asked too", "words")),
        rows=tuple(
            row(
                one.ablation,
                one.name,
                one.state.value,
                wording.moment(one.created_at),
                ", ".join(one.asked),
                ", ".join(f"{arm}: {VerdictWord(word).value}" for arm, word in one.words.items()) or wording.NOTHING,
            )
            for one in known.family.earlier
        ),
        note="Whoever asks often enough finds something by chance. So each asking is tested at its own, stricter "
        f"level, which keeps 5{wording.SPACE}% over all of them. One that ran anything counts, also without a valid "
        "sample: whoever asks again could see how it went.",
    )
