"""The answer in plain sentences: what each variant did, what the rule decides, and where an unfinished run stands."""

from dataclasses import dataclass

from experiments.analysis.verdicts import Comparison, VariantVerdict, Verdict
from experiments.outcomes import Decision, VerdictWord
from experiments.reporting import wording
from experiments.reporting.view import AblationView

WITHOUT_STATISTICS: dict[VerdictWord, str] = {
    VerdictWord.INVALID: "has no valid measurement",
    VerdictWord.REFUSED: "was refused: a gate that was asked for was not live",
    VerdictWord.OOM: "ran out of memory",
    VerdictWord.FAILED: "failed before it could be measured",
}

WITHOUT_VERDICT: dict[str, str] = {
    "queued": "Nothing has run yet. The answer appears here when the last block is done.",
    "running": "Still running. The answer appears here when the last block is done.",
    "cancelling": "Being cancelled. What was measured until now is kept.",
    "cancelled": "Cancelled before there was a verdict. What was measured until then is kept.",
    "failed": "Failed before there was a verdict. What was measured until then is kept.",
    "completed": "Every block is done, and the verdict has not been computed yet.",
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One variant's answer, ready to be read."""

    arm: str
    word: str
    badge: wording.Badge
    sentence: str
    """What happened, with the interval."""
    reason: str
    decision: str
    remarks: tuple[str, ...]
    """What would resolve it, what was capped, and the verdict's own notes."""


def lead(view: AblationView) -> str:
    """Answer the question in one sentence: the decisions of all variants, or where the ablation stands."""
    if view.verdict is None:
        return WITHOUT_VERDICT.get(view.state, f"There is no verdict; the state is {view.state}.")
    parts = [
        part
        for decision, say in _LEADS.items()
        if (part := say.format(wording.listed([v.arm for v in view.verdict.variants if v.decision is decision])))
        and any(v.decision is decision for v in view.verdict.variants)
    ]
    sentence = "; ".join(parts)
    return f"{sentence[:1].upper()}{sentence[1:]}." if sentence else "There was no variant to judge."


def waiting(view: AblationView) -> str:
    """Say why there is no answer yet, and what there is instead."""
    blocks = {trial.block_index for trial in view.trials if trial.receipt is not None}
    return (
        f"No verdict is given before the rule, fixed at submission, has seen its blocks; {len(blocks)} of "
        f"{wording.counted(len(view.plan.blocks), 'block')} have left receipts."
    )


_LEADS: dict[Decision, str] = {
    Decision.ADOPT: "adopt {}",
    Decision.REJECT: "do not adopt {}",
    Decision.SAME: "no practical difference for {}",
    Decision.INCONCLUSIVE: "not decided for {}",
    Decision.INVALID: "no valid measurement of {}",
}


def answers(verdict: Verdict) -> tuple[Answer, ...]:
    """Say every variant's verdict in sentences."""
    return tuple(
        Answer(
            arm=variant.arm,
            word=variant.verdict.value,
            badge=wording.BADGES[variant.verdict],
            sentence=_sentence(variant),
            reason=variant.reason,
            decision=wording.DECISIONS[variant.decision],
            remarks=_remarks(variant, verdict),
        )
        for variant in verdict.variants
    )


def _sentence(variant: VariantVerdict) -> str:
    if variant.primary is None:
        return f"It {WITHOUT_STATISTICS.get(variant.verdict, 'has no statistics')}."
    return f"{_change(variant.primary)} over {wording.counted(variant.primary.blocks, 'block')}."


def _change(found: Comparison) -> str:
    name = wording.metric(found.metric)
    return (
        f"{name[:1].upper()}{name[1:]} changed by {wording.percent(found.delta_pct)}, 95{wording.SPACE}% interval "
        f"{wording.interval(found.ci_low_pct, found.ci_high_pct)},"
    )


def _remarks(variant: VariantVerdict, verdict: Verdict) -> tuple[str, ...]:
    remarks = []
    if variant.measured is not variant.verdict:
        why = "" if verdict.calibrated else f", because node class {verdict.node_class} is not calibrated"
        remarks.append(
            f"The samples alone say {variant.measured.value}; it is published as {variant.verdict.value}{why}."
        )
    if variant.blocks_needed is not None:
        cost = variant.device_minutes_needed
        minutes = "" if cost is None else f", about {wording.counted(round(cost), 'device minute')} more"
        remarks.append(
            f"About {wording.counted(variant.blocks_needed, 'block')} in all would resolve the margin{minutes}."
        )
    return (*remarks, *variant.notes)
