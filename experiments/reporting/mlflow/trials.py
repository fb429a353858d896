"""One MLflow run per trial: its receipt, its step series, and the reason if it gave no measurement."""

import math
from collections.abc import Iterator

from experiments.block_numbers import block_number, place_number
from experiments.design.arms import Arm
from experiments.design.metrics import METRICS
from experiments.outcomes import Outcome, TrialState
from experiments.records.receipts import Receipt, read_metric
from experiments.reporting import wording
from experiments.reporting.mlflow import content
from experiments.reporting.pictures import drawing
from experiments.reporting.view import AblationView, TrialView
from model.measurements import Step

MOST_POINTS = 2500
"""Points per series that MLflow's own pages read. receipt.json has every step."""
LONGEST_REASON = 500
WITHOUT_RECEIPT: dict[str, str] = {TrialState.CANCELLED: "KILLED", TrialState.FAILED: "FAILED"}
"""Status of a trial that started and left no receipt."""


def trial_runs(view: AblationView) -> Iterator[content.RunContent]:
    """Yield a run per trial that has ended, with or without a receipt."""
    arms = view.plan.arm_by_name
    for trial in view.trials:
        if trial.receipt is not None:
            yield _measured(view, trial, trial.receipt, arms[trial.arm])
        elif trial.attempt_id is not None and trial.state in WITHOUT_RECEIPT:
            yield _lost(view, trial, arms[trial.arm])


def _measured(view: AblationView, trial: TrialView, receipt: Receipt, arm: Arm) -> content.RunContent:
    started = content.milliseconds(receipt.started_at)
    measured = receipt.outcome is Outcome.MEASURED
    tags = _tags(view, trial, arm) | content.source_tags([receipt])
    tags |= {
        "ablation.seed": str(receipt.seed),
        "ablation.outcome": receipt.outcome.value,
        "ablation.receipt_digest": receipt.digest,
        "ablation.code_digest": receipt.digests.code,
        "ablation.data_digest": receipt.digests.data,
        "ablation.node": receipt.environment.node_name,
        "ablation.device": receipt.environment.device_name,
        "ablation.failure_class": receipt.failure_class.value if receipt.failure_class else "",
        content.NOTE_TAG: wording.shorten(receipt.message or "", LONGEST_REASON),
    }
    place = f" s{receipt.seed} b{block_number(trial.block_index):02}"
    return content.finite(
        content.RunContent(
            identity=_identity(trial),
            name=content.run_name(trial.arm, place if measured else f"{place}: {receipt.outcome}"),
            status="FINISHED" if measured else "FAILED",
            started_ms=started,
            ended_ms=content.receipt_ended_ms(receipt),
            tags=tags,
            params=content.params(arm),
            points=(*_summary_points(receipt), *_step_points(receipt, started)),
            texts={"receipt.json": receipt.model_dump_json()},
            datasets=content.datasets([receipt]),
        )
    )


def _lost(view: AblationView, trial: TrialView, arm: Arm) -> content.RunContent:
    created = content.milliseconds(view.created_at)
    return content.finite(
        content.RunContent(
            identity=_identity(trial),
            name=content.run_name(trial.arm, f" b{block_number(trial.block_index):02}: {trial.state}"),
            status=WITHOUT_RECEIPT[trial.state],
            started_ms=created,
            ended_ms=created,
            tags=_tags(view, trial, arm)
            | {"ablation.outcome": trial.state, content.NOTE_TAG: wording.shorten(trial.reason or "", LONGEST_REASON)},
            params=content.params(arm),
        )
    )


def _identity(trial: TrialView) -> str:
    return f"{trial.trial_id}/{trial.attempt_id}"


def _tags(view: AblationView, trial: TrialView, arm: Arm) -> dict[str, str]:
    return content.common_tags(view, content.RunKind.TRIAL, _identity(trial)) | {
        "ablation.trial": trial.trial_id,
        "ablation.attempt": trial.attempt_id or "",
        "ablation.arm": trial.arm,
        "ablation.role": arm.role,
        "ablation.block": str(block_number(trial.block_index)),
        "ablation.order": str(place_number(trial.position)),
        "ablation.arm_digest": arm.digest,
    }


def _summary_points(receipt: Receipt) -> list[content.Point]:
    values = {name: read_metric(metric, receipt) for name, metric in METRICS.items()}
    values |= {"training_s": receipt.training_s, "wall_s": receipt.wall_s}
    if receipt.summary is not None:
        values |= {"mfu": receipt.summary.mfu, "step_s_median": receipt.summary.step_s_median}
    ended = content.receipt_ended_ms(receipt)
    return [content.Point(name, value, ended, 0) for name, value in values.items() if value is not None]


def _step_points(receipt: Receipt, started_ms: int) -> list[content.Point]:
    points: list[content.Point] = []
    seconds = 0.0
    kept = {step.index for step in drawing.thin(receipt.steps, MOST_POINTS)}
    for step in receipt.steps:
        seconds += step.seconds if math.isfinite(step.seconds) else 0.0
        if step.index in kept:
            at_ms = started_ms + round(1000 * seconds)
            points += [
                content.Point(f"steps/{name}", value, at_ms, step.index) for name, value in _step_values(step).items()
            ]
    return points


def _step_values(step: Step) -> dict[str, float]:
    values = {"loss": step.loss, "grad_norm": step.grad_norm, "seconds": step.seconds}
    if step.seconds > 0:
        values["tokens_per_s"] = step.tokens / step.seconds
    if step.clock_mhz is not None:
        values["clock_mhz"] = step.clock_mhz
    return values
