"""What a run in MLflow is made of, as plain data, and what all runs of an ablation have in common.

Every value, time included, is derived from the view, so that projecting twice writes the same bytes.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from pathlib import PurePath
from typing import Any, NamedTuple

from experiments.design.arms import Arm
from experiments.design.gates import GATES
from experiments.digest import canonical_json, digest, digest_bytes
from experiments.records.receipts import Receipt
from experiments.reporting.view import AblationView

KIND_TAG = "ablation.kind"


class RunKind(StrEnum):
    """What a run stands for."""

    ABLATION = "ablation"
    """The parent: the whole answer."""
    ARM = "arm"
    """One arm over all blocks: of a variant its answer, of the baseline the A/A evidence."""
    TRIAL = "trial"


LAYOUT = 5
"""Raise when the same view is written differently: the next projection then rewrites every run."""
ID_TAG, RUN_TAG, DONE_TAG = "ablation.id", "ablation.run", "ablation.projected"
NOTE_TAG, COMMIT_TAG, DIRTY_TAG = "mlflow.note.content", "mlflow.source.git.commit", "mlflow.source.git.dirty"
LONGEST_TAG = 7900
"""MLflow cuts tags beyond 8000 characters without a word."""


class Point(NamedTuple):
    """One metric value."""

    key: str
    value: float
    at_ms: int
    step: int


class RunDataset(NamedTuple):
    """What a run trained on."""

    name: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class RunContent:
    """One run as it has to be in MLflow."""

    identity: str
    """`parent`, `arm/` and its name, or trial and attempt: together with the ablation's id it names the run."""
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
    datasets: tuple[RunDataset, ...] = ()

    @property
    def digest(self) -> str:
        """Digest of all that is written: a run that carries it needs no writing."""
        texts = {path: digest_bytes(text.encode()) for path, text in self.texts.items()}
        facts = [self.identity, self.name, self.status, self.started_ms, self.ended_ms, self.datasets]
        return digest([LAYOUT, *facts, self.tags, self.params, self.points, texts])


def common_tags(view: AblationView, kind: RunKind, identity: str) -> dict[str, str]:
    """Return the tags that every run of an ablation has."""
    return {
        ID_TAG: view.ablation_id,
        "ablation.name": view.name,
        RUN_TAG: identity,
        KIND_TAG: kind,
        "ablation.spec_digest": view.spec_digest,
        "ablation.node_class": view.plan.node_class,
        "mlflow.source.name": "ablate",
        "mlflow.source.type": "JOB",
        "mlflow.user": "ablate",
    }


def source_tags(receipts: Iterable[Receipt]) -> dict[str, str]:
    """Return the commit that ran and whether its tree was clean; several, which only reruns give, are listed."""
    ran = [receipt.environment for receipt in receipts]
    commits = sorted({environment.git_commit for environment in ran if environment.git_commit})
    dirty = any(environment.git_dirty_digest is not None for environment in ran)
    return {COMMIT_TAG: ", ".join(commits), DIRTY_TAG: str(dirty).lower()} if commits else {}


def datasets(receipts: Iterable[Receipt]) -> tuple[RunDataset, ...]:
    """Return what the trials of `receipts` trained on, each data set once."""
    found = {r.digests.data: PurePath(r.config["data"]["corpus"]).name for r in receipts}
    return tuple(RunDataset(name, data) for data, name in sorted(found.items()))


def params(arm: Arm) -> dict[str, str]:
    """Return resolved gates as `gate.*`, and every leaf of the configuration as `shape.<name>` or by its path.

    What a gate sets is left out of the configuration, unless it is a size: those are looked for among the shapes.
    """
    found = {f"gate.{name}": text(value) for name, value in arm.gates.items()}
    set_by_gates = {gate.path for gate in GATES.values()}
    for path, value in _leaves(arm.config):
        if path in set_by_gates and type(value) is not int:
            continue
        leaf = path.rsplit(".", 1)[-1]
        is_shape = path.startswith(("model.", "data.")) or "." not in path
        found[f"shape.{leaf}" if is_shape and f"shape.{leaf}" not in found else f"config.{path}"] = text(value)
    return {allowed_key(name): value for name, value in found.items()}


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def text(value: Any) -> str:
    """Return a value as the text of a parameter."""
    return value if isinstance(value, str) else canonical_json(value)


def finite(content: RunContent) -> RunContent:
    """Move non-finite values from metrics, where MLflow distorts them, to tags that name them; leave out empty tags."""
    tags = {key: value for key, value in content.tags.items() if value}
    for point in content.points:
        if not math.isfinite(point.value):
            tags.setdefault(f"ablation.nonfinite.{point.key}", f"{point.value} at step {point.step}")
    points = tuple(point for point in content.points if math.isfinite(point.value))
    return replace(content, tags=tags, points=points)


def ended_ms(view: AblationView) -> int:
    """Return when the last trial ended; where none left a receipt, when the ablation was submitted."""
    return max((receipt_ended_ms(receipt) for receipt in view.receipts), default=milliseconds(view.created_at))


def receipt_ended_ms(receipt: Receipt) -> int:
    """Return when a trial ended."""
    return milliseconds(receipt.started_at) + round(1000 * (receipt.wall_s + (receipt.waited_s or 0.0)))


def milliseconds(rfc3339: str) -> int:
    """Return a moment as MLflow wants it."""
    return round(1000 * datetime.fromisoformat(rfc3339).timestamp())


def allowed_key(wanted: str) -> str:
    """Replace what MLflow does not allow in keys."""
    return re.sub(r"[^\w\-./: ]", "_", wanted, flags=re.ASCII)
