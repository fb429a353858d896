"""A bundle as its readers see it: judged by the rule that was hashed before its first sample."""

from experiments.analysis.verdicts import NODE_CLASS_IS_CALIBRATED, Verdict, judge
from experiments.records.bundle import Bundle
from experiments.reporting.view import AblationView, TrialView


def judge_bundle(bundle: Bundle) -> Verdict:
    """Return the verdict of the blocks that `bundle` holds."""
    file = bundle.plan_file
    receipts = [trial.receipt for block in bundle.blocks for trial in block.trials]
    return judge(file.plan, file.spec, receipts, NODE_CLASS_IS_CALIBRATED)


def judged(bundle: Bundle) -> AblationView:
    """Return the ablation of `bundle` with its verdict; planned trials that it does not hold are missing data."""
    file = bundle.plan_file
    receipts = {trial.trial_id: trial.receipt for block in bundle.blocks for trial in block.trials}
    attempts = {block.attempt.index: block.attempt.attempt_id for block in bundle.blocks}
    trials = tuple(
        TrialView(
            trial_id=trial_id,
            block_index=block.index,
            arm=arm,
            position=position,
            state="done" if trial_id in receipts else "missing",
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
        state="completed" if bundle.blocks else "failed",
        created_at=file.made_at,
        spec_text=file.spec_text,
        spec_digest=file.plan.spec_digest,
        plan=file.plan,
        verdict=judge_bundle(bundle),
        trials=trials,
    )
