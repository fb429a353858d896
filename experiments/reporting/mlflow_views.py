"""Saved views of MLflow's list of runs, seeded once: an experiment opens with the answers instead of every trial.

MLflow keeps a saved view as a tag of the experiment: a name, a time, and the page's state as JSON.
"""

from typing import Any, NamedTuple

from experiments.digest import canonical_json
from experiments.reporting.mlflow_content import KIND_TAG, RunKind

PREFIX = "mlflow.sharedViewState."
CREATED_AT_MS = 1_795_000_000_000
"""The same for every projection; the views are listed by it."""
EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    "mlflow.experiment.primaryMetric.name": "tokens_per_s",
    "mlflow.experiment.primaryMetric.greaterIsBetter": "True",
}


class SavedView(NamedTuple):
    """One view: which kind of runs it lists, and their columns."""

    id: str
    name: str
    kind: RunKind
    columns: tuple[str, ...]
    order_by: str


ABLATIONS = SavedView(
    "ablations",
    "Ablations",
    RunKind.ABLATION,
    tuple(f"tags.`ablation.{name}`" for name in ("verdict", "effect", "interval", "gates")),
    "attributes.start_time",
)
VARIANTS = SavedView(
    "variants",
    "Variants",
    RunKind.ARM,
    (
        *(f"tags.`ablation.{name}`" for name in ("verdict", "decision", "gates")),
        *(f"metrics.`{name}`" for name in ("effect_pct", "ci_low_pct", "ci_high_pct", "tokens_per_s")),
    ),
    "metrics.`effect_pct`",
)
SAVED_VIEWS = (ABLATIONS, VARIANTS)


def experiment_tags() -> dict[str, str]:
    """Return the tags that an experiment begins with."""
    return EXPERIMENT_TAGS | {f"{PREFIX}{one.id}": _value(one) for one in SAVED_VIEWS}


def _value(one: SavedView) -> str:
    return canonical_json({"name": one.name, "createdAt": CREATED_AT_MS, "state": canonical_json(_state(one))})


def _state(one: SavedView) -> dict[str, Any]:
    return {
        "searchFilter": f"tags.`{KIND_TAG}` = '{one.kind}'",
        "orderByKey": one.order_by,
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "selectedColumns": list(one.columns),
    }
