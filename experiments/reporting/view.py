"""One ablation from a service's store or from a bundle, as input of the report and of MLflow."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, TypeAlias

from ablate.experiments.analysis.arm_summary import summarise_arm
from ablate.experiments.analysis.evidence import WholeBlocks
from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.noise.admission import admission_of, keep_ledger, mending_command
from ablate.experiments.analysis.noise.calibrate import calibrations_of, join_calibrations
from ablate.experiments.analysis.statistics import percent
from ablate.experiments.analysis.verdicts import ArmSummary, Verdict
from ablate.experiments.design.metrics import CURVE_METRICS
from ablate.experiments.design.plan import Plan
from ablate.experiments.outcomes import AblationState, TrialState
from ablate.experiments.records.bundle import Bundle, attempt_records
from ablate.experiments.records.calibration import Calibration
from ablate.experiments.records.circumstances import Circumstances, Family
from ablate.experiments.records.plan_file import carried_plan
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.verdict_layout import VerdictLayout, lay_out
from ablate.experiments.retries import budget_spent

Missing: TypeAlias = Literal["missing"]
MISSING: Final = "missing"
"""State of a planned trial that is not in a bundle."""

WITHOUT_VERDICT: dict[AblationState, str] = {
    AblationState.QUEUED: "Nothing has run yet. The answer appears here when the last block is done.",
    AblationState.RUNNING: "Still running. The answer appears here when the last block is done.",
    AblationState.CANCELLING: "Being cancelled. The measurements so far are kept.",
    AblationState.CANCELLED: "Cancelled before there was a verdict. The measurements are kept.",
    AblationState.FAILED: "Failed before there was a verdict. The measurements are kept.",
    AblationState.COMPLETED: "Every block is done. The verdict has not been computed yet.",
}
"""Lead of an ablation without a verdict."""


@dataclass(frozen=True, kw_only=True)
class TrialView:
    """One trial, with its receipt if there is one."""

    trial_id: str
    block_index: int
    """From 0; pages show `block_number(block_index)`."""
    arm: str
    position: int
    """Place in the block's order, from 0; pages show `place_number(position)`."""
    state: TrialState | Missing
    attempt_id: str | None
    receipt: Receipt | None
    reason: str | None = None
    """Why it ended without a receipt."""


@dataclass(frozen=True, kw_only=True)
class AblationView:
    """One ablation with all its stored data."""

    ablation_id: str
    name: str
    question: str
    state: AblationState
    created_at: str
    """RFC 3339 UTC."""
    spec_text: str
    content_type: str
    """Of the spec."""
    spec_digest: str
    plan: Plan
    verdict: Verdict | None
    trials: tuple[TrialView, ...]

    @cached_property
    def receipts(self) -> tuple[Receipt, ...]:
        """All receipts in the order in which the trials started."""
        receipts = [trial.receipt for trial in self.trials if trial.receipt is not None]
        return tuple(sorted(receipts, key=lambda r: (r.started_at, r.ids.block_index, r.ids.position)))

    @cached_property
    def whole_blocks(self) -> WholeBlocks:
        """The blocks that count for the judge."""
        return WholeBlocks(self.plan, self.receipts)

    def changes(self, variant: str, metric: str) -> dict[int, float]:
        """Return the change of a variant against the baseline in percent, by block index, if both were measured.

        These are the verdict's `differences_pct`, block by block.
        """
        if metric in CURVE_METRICS:
            return self._changes_of_curves(variant, metric)
        pairs = {pair.block_index: pair.log_ratio(metric) for pair in self.whole_blocks.pairs(variant)}
        return {block_index: percent(d) for block_index, d in pairs.items() if d is not None}

    def _changes_of_curves(self, variant: str, metric: str) -> dict[int, float]:
        judged = [] if self.verdict is None else [one.primary for one in self.verdict.variants if one.arm == variant]
        compared = next((one for one in judged if one is not None and one.metric == metric), None)
        if compared is None:
            return {}
        indices = (pair.block_index for pair in self.whole_blocks.pairs(variant))
        return dict(zip(indices, compared.differences_pct, strict=True))

    @cached_property
    def arms(self) -> dict[str, ArmSummary]:
        """Summary of every arm over the blocks that count, as in the verdict."""
        return {arm.name: summarise_arm(self.whole_blocks.of(arm.name)) for arm in self.plan.arms}

    @cached_property
    def answer(self) -> VerdictLayout | None:
        """The layout of the verdict; None without a verdict."""
        return None if self.verdict is None else lay_out(self.verdict)

    @property
    def lead(self) -> str:
        """The answer in one sentence, or the state of the ablation."""
        return WITHOUT_VERDICT[self.state] if self.answer is None else self.answer.lead

    def with_loss_unit(self, label: str) -> str:
        """Return the label of a loss with its unit; nobody knows that of a program's loss."""
        return label if self.plan.baseline.config.own_process else f"{label}, nats"

    @property
    def waiting(self) -> str:
        """Why there is no answer yet, and how many blocks have receipts."""
        done = f"{len(self.whole_blocks.blocks)} of {wording.counted(len(self.plan.blocks), 'block')}"
        return f"The rule, fixed at submission, gives no verdict before it has its blocks; {done} have receipts."


def judge_bundle(bundle: Bundle, calibrations: Sequence[Calibration] = ()) -> Verdict:
    """Return the verdict on the blocks of `bundle`, by the rule that was hashed before its first sample.

    `calibrations` come from elsewhere; a bundle of A/A blocks has its own.
    """
    file = bundle.plan_file
    receipts = [trial.receipt for block in bundle.blocks for trial in block.trials]
    own = calibrations_of(file.plan, file.spec, receipts, bundle.signed_by)
    noise = join_calibrations([*calibrations, *own])
    command = mending_command(file.plan.node_class, "SPEC")
    admission = admission_of(file.spec, receipts, noise, ledger=keep_ledger(noise), mended_by=command)
    circumstances = Circumstances(
        family=Family() if file.registered is None else file.registered.family,
        carried=carried_plan(file),
        attempts=attempt_records(bundle),
        admission=admission,
        signers=bundle.signers,
        not_run=_not_run(bundle),
    )
    return judge(file.plan, file.spec, receipts, circumstances)


def _not_run(bundle: Bundle) -> str | None:
    """Return that the budget is used up if blocks are missing for that reason; `ablate offline exec` stops there."""
    if not bundle.missing:
        return None
    seconds = sum(one.seconds for one in (*(block.attempt for block in bundle.blocks), *bundle.broken))
    used = bundle.plan_file.plan.busy_devices * seconds / 60
    return budget_spent(used, bundle.plan_file.spec.limits.device_minutes)


def bundle_view(bundle: Bundle, calibrations: Sequence[Calibration] = ()) -> AblationView:
    """Return the ablation of `bundle` with its verdict; planned trials that it lacks are missing data."""
    file = bundle.plan_file
    receipts = {trial.trial_id: trial.receipt for block in bundle.blocks for trial in block.trials}
    attempts = {block.attempt.index: block.attempt.attempt_id for block in bundle.blocks}
    trials = tuple(
        TrialView(
            trial_id=trial_id,
            block_index=block.index,
            arm=arm,
            position=position,
            state=TrialState.DONE if trial_id in receipts else MISSING,
            attempt_id=attempts.get(block.index),
            receipt=receipts.get(trial_id),
        )
        for block, ids in zip(file.plan.blocks, file.blocks, strict=True)
        for position, (arm, trial_id) in enumerate(zip(block.order, ids.trial_ids, strict=True))
    )
    return AblationView(
        ablation_id=file.ablation_id,
        name=file.plan.ablation,
        question=file.spec.question,
        state=AblationState.COMPLETED if bundle.blocks else AblationState.FAILED,
        created_at=file.made_at,
        spec_text=file.spec_text,
        content_type=file.content_type,
        spec_digest=file.plan.spec_digest,
        plan=file.plan,
        verdict=judge_bundle(bundle, calibrations),
        trials=trials,
    )
