"""What one ablation is in MLflow, as plain data: a parent run with the answer and a child run for every trial.

Every value, time included, is derived from the view, so that projecting twice writes the same bytes.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from experiments.block_numbers import block_number, place_number
from experiments.design.arms import Arm
from experiments.design.metrics import METRICS
from experiments.digest import canonical_json, digest, digest_bytes
from experiments.outcomes import AblationState, Outcome, TrialState
from experiments.records.circumstances import Circumstances
from experiments.records.receipts import Receipt, Step, read_metric
from experiments.reporting import drawing, pictures, wording
from experiments.reporting.markdown import verdict_markdown
from experiments.reporting.view import AblationView, TrialView

LAYOUT = 3
"""Raise when the same view is written differently: the next projection then rewrites every run."""
PARENT = "parent"
ID_TAG, RUN_TAG, DONE_TAG = "ablation.id", "ablation.run", "ablation.projected"
MOST_POINTS = 2500
"""Per series: what MLflow's own pages read. Every step is in receipt.json."""
LONGEST_TAG = 7900
"""MLflow cuts tags beyond 8000 characters without a word."""
LONGEST_MESSAGE = 500
PARENT_STATUS: dict[AblationState, str] = {
    AblationState.QUEUED: "SCHEDULED",
    AblationState.RUNNING: "RUNNING",
    AblationState.CANCELLING: "RUNNING",
    AblationState.CANCELLED: "KILLED",
    AblationState.COMPLETED: "FINISHED",
    AblationState.FAILED: "FAILED",
}
ENDED_WITHOUT_RECEIPT: dict[str, str] = {TrialState.CANCELLED: "KILLED", TrialState.FAILED: "FAILED"}


class Point(NamedTuple):
    """One metric value."""

    key: str
    value: float
    at_ms: int
    step: int


@dataclass(frozen=True, kw_only=True)
class RunContent:
    """One run as it has to be in MLflow."""

    identity: str
    """`parent`, or trial and attempt: together with the ablation's id it names the run."""
    name: str
    status: str
    started_ms: int
    ended_ms: int | None
    """None while it is not over."""
    tags: Mapping[str, str]
    params: Mapping[str, str] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    """Artefacts by path."""
    dataset: str | None = None
    """Digest of the data."""

    @property
    def digest(self) -> str:
        """Digest of all that is written: a run that carries it needs no writing."""
        texts = {path: digest_bytes(text.encode()) for path, text in self.texts.items()}
        facts = [self.identity, self.name, self.status, self.started_ms, self.ended_ms, self.dataset]
        return digest([LAYOUT, *facts, self.tags, self.params, self.points, texts])


def parent(view: AblationView, report_html: str) -> RunContent:
    """Describe the parent run: the verdict as note, metrics, tags and files."""
    verdict = view.verdict
    ended = _ended_ms(view)
    tags = _ablation_tags(view) | {
        RUN_TAG: PARENT,
        "ablation.role": "ablation",
        "ablation.name": view.name,
        "ablation.question": view.question,
        "ablation.state": view.state,
        "ablation.rule_digest": view.plan.rule_digest,
        "mlflow.note.content": _note(view),
    }
    texts = {"report.html": report_html, "plan.json": canonical_json(view.plan.model_dump(mode="json"))}
    points: list[Point] = []
    if verdict is not None and view.answer is not None:
        tags["ablation.calibrated"] = str(verdict.calibrated).lower()
        tags["ablation.verdict_digest"] = verdict.digest
        tags |= _circumstance_tags(verdict.circumstances)
        for variant in verdict.variants:
            tags[_key(f"ablation.verdict.{variant.arm}")] = variant.verdict.value
            tags[_key(f"ablation.decision.{variant.arm}")] = variant.decision.value
            if variant.cause is not None:
                tags[_key(f"ablation.cause.{variant.arm}")] = variant.cause.value
        points = [
            Point(_key(f"verdict/{variant.arm}/{name}"), value, ended, verdict.blocks_counted)
            for variant in view.answer.variants
            for name, value in variant.numbers.items()
        ]
        texts["verdict.json"] = canonical_json(verdict.model_dump(mode="json"))
    return _finite(
        RunContent(
            identity=PARENT,
            name=view.name,
            status=PARENT_STATUS[view.state],
            started_ms=_ms(view.created_at),
            ended_ms=ended if PARENT_STATUS[view.state] not in {"SCHEDULED", "RUNNING"} else None,
            tags=tags,
            params={
                "design.blocks": str(len(view.plan.blocks)),
                "design.arms": str(len(view.plan.arms)),
                "placement.node_class": view.plan.node_class,
                "placement.devices": str(view.plan.devices),
            },
            points=tuple(points),
            texts=texts,
        )
    )


def _circumstance_tags(known: Circumstances) -> dict[str, str]:
    """Say what the verdict took into account: A/A evidence, attempts that did not count, earlier askings."""
    evidence = ", ".join(found.digest for found in known.admission.calibrations)
    return {
        "ablation.admission": known.admission.refused_because or "admitted",
        "ablation.broken_attempts": str(len(known.attempts)),
        "ablation.asking": str(known.family.number),
        **({"ablation.calibrations": evidence} if evidence else {}),
    }


def plots(view: AblationView) -> dict[str, str]:
    """Return the pictures of the report as SVG files."""
    return {f"plots/{picture.name}.svg": picture.standalone() for picture in pictures.draw_all(view)}


def children(view: AblationView) -> Iterable[RunContent]:
    """Describe a run for every trial that left a receipt or ended without one; trials that wait have none."""
    arms = {arm.name: arm for arm in view.plan.arms}
    for trial in view.trials:
        if trial.receipt is not None:
            yield _measured_child(view, trial, trial.receipt, arms[trial.arm])
        elif trial.attempt_id is not None and trial.state in ENDED_WITHOUT_RECEIPT:
            yield _lost_child(view, trial, arms[trial.arm])


def _measured_child(view: AblationView, trial: TrialView, receipt: Receipt, arm: Arm) -> RunContent:
    started = _ms(receipt.started_at)
    environment = receipt.environment
    tags = _child_tags(view, trial, arm) | {
        "ablation.seed": str(receipt.seed),
        "ablation.outcome": receipt.outcome.value,
        "ablation.receipt_digest": receipt.digest,
        "ablation.code_digest": receipt.digests.code,
        "ablation.data_digest": receipt.digests.data,
        "ablation.node": environment.node_name,
        "ablation.device": environment.device_name,
        "mlflow.source.git.commit": environment.git_commit or "",
        "mlflow.source.git.dirty": str(environment.git_dirty_digest is not None).lower(),
        "ablation.failure_class": receipt.failure_class.value if receipt.failure_class else "",
        "ablation.message": wording.shorten(receipt.message or "", LONGEST_MESSAGE),
    }
    return _finite(
        RunContent(
            identity=tags[RUN_TAG],
            name=f"{trial.arm} s{receipt.seed} b{block_number(trial.block_index):02}",
            status="FINISHED" if receipt.outcome is Outcome.MEASURED else "FAILED",
            started_ms=started,
            ended_ms=started + round(1000 * receipt.wall_s),
            tags={key: value for key, value in tags.items() if value},
            params=_params(arm),
            points=(*_summary_points(receipt, started), *_step_points(receipt, started)),
            texts={"receipt.json": receipt.model_dump_json()},
            dataset=receipt.digests.data,
        )
    )


def _lost_child(view: AblationView, trial: TrialView, arm: Arm) -> RunContent:
    tags = _child_tags(view, trial, arm) | {"ablation.outcome": trial.state}
    created = _ms(view.created_at)
    return RunContent(
        identity=tags[RUN_TAG],
        name=f"{trial.arm} b{block_number(trial.block_index):02}",
        status=ENDED_WITHOUT_RECEIPT[trial.state],
        started_ms=created,
        ended_ms=created,
        tags=tags,
        params=_params(arm),
    )


def _ablation_tags(view: AblationView) -> dict[str, str]:
    return {
        ID_TAG: view.ablation_id,
        "ablation.spec_digest": view.spec_digest,
        "ablation.node_class": view.plan.node_class,
        "mlflow.source.name": "ablate",
        "mlflow.source.type": "JOB",
        "mlflow.user": "ablate",
    }


def _child_tags(view: AblationView, trial: TrialView, arm: Arm) -> dict[str, str]:
    return _ablation_tags(view) | {
        RUN_TAG: f"{trial.trial_id}/{trial.attempt_id}",
        "ablation.trial": trial.trial_id,
        "ablation.attempt": trial.attempt_id or "",
        "ablation.arm": trial.arm,
        "ablation.role": arm.role,
        "ablation.block": str(block_number(trial.block_index)),
        "ablation.order": str(place_number(trial.position)),
        "ablation.arm_digest": arm.digest,
    }


def _params(arm: Arm) -> dict[str, str]:
    """Return resolved gates as `gate.*`, and every leaf of the configuration as `shape.<name>` or by its path."""
    params = {f"gate.{name}": _text(value) for name, value in arm.gates.items()}
    for path, value in _leaves(arm.config):
        leaf = path.rsplit(".", 1)[-1]
        is_shape = path.startswith(("model.", "data.")) or "." not in path
        params[f"shape.{leaf}" if is_shape and f"shape.{leaf}" not in params else f"config.{path}"] = _text(value)
    return {_key(name): value for name, value in params.items()}


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value)


def _summary_points(receipt: Receipt, started_ms: int) -> list[Point]:
    values = {name: read_metric(metric, receipt) for name, metric in METRICS.items()}
    values |= {"training_s": receipt.training_s, "wall_s": receipt.wall_s}
    if receipt.summary is not None:
        values |= {"mfu": receipt.summary.mfu, "step_s_median": receipt.summary.step_s_median}
    ended = started_ms + round(1000 * receipt.wall_s)
    return [Point(name, value, ended, 0) for name, value in values.items() if value is not None]


def _step_points(receipt: Receipt, started_ms: int) -> list[Point]:
    points: list[Point] = []
    seconds = 0.0
    kept = {step.index for step in drawing.thin(receipt.steps, MOST_POINTS)}
    for step in receipt.steps:
        seconds += step.seconds if math.isfinite(step.seconds) else 0.0
        if step.index in kept:
            at_ms = started_ms + round(1000 * seconds)
            points += [Point(f"steps/{name}", value, at_ms, step.index) for name, value in _step_values(step).items()]
    return points


def _step_values(step: Step) -> dict[str, float]:
    values = {"loss": step.loss, "grad_norm": step.grad_norm, "seconds": step.seconds}
    if step.seconds > 0:
        values["tokens_per_s"] = step.tokens / step.seconds
    if step.clock_mhz is not None:
        values["clock_mhz"] = step.clock_mhz
    return values


def _note(view: AblationView) -> str:
    table = "" if view.verdict is None else f"\n\n{verdict_markdown(view.verdict)}"
    rest = "\n\nThe whole answer, with pictures, is the artefact `report.html`."
    text = f"**{view.question}**\n\n{view.lead}{table}{rest}"
    if len(text) <= LONGEST_TAG:
        return text
    cut = f"\n\nCut here: MLflow holds no more.{rest}"
    return text[: LONGEST_TAG - len(cut)].rsplit("\n", 1)[0] + cut


def _finite(content: RunContent) -> RunContent:
    """Move non-finite values from metrics, where MLflow distorts them, to tags that name them."""
    tags = dict(content.tags)
    for point in content.points:
        if not math.isfinite(point.value):
            tags.setdefault(f"ablation.nonfinite.{point.key}", f"{point.value} at step {point.step}")
    points = tuple(point for point in content.points if math.isfinite(point.value))
    return RunContent(**{**vars(content), "tags": tags, "points": points})


def _ended_ms(view: AblationView) -> int:
    receipts = [trial.receipt for trial in view.trials if trial.receipt is not None]
    ends = [_ms(receipt.started_at) + round(1000 * receipt.wall_s) for receipt in receipts]
    return max(ends, default=_ms(view.created_at))


def _ms(rfc3339: str) -> int:
    return round(1000 * datetime.fromisoformat(rfc3339).timestamp())


def _key(text: str) -> str:
    """Replace what MLflow does not allow in keys."""
    return re.sub(r"[^\w\-./: ]", "_", text, flags=re.ASCII)
