"""Saved views of MLflow's list of runs: an experiment opens with the answers instead of every trial.

MLflow stores a saved view as a tag of the experiment: a name, a time, and the page's state as JSON. If a person changes
the view, MLflow adds `updatedAt`, and the view belongs to that person. Unchanged views follow their definition here.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ablate.experiments.digest import canonical_json
from ablate.experiments.reporting.mlflow.content import KIND_TAG, RunKind

PREFIX = "mlflow.sharedViewState."
CREATED_AT_MS = 1_795_000_000_000
"""Constant, so that every projection writes the same tag; MLflow sorts the views by it."""
EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    "mlflow.experiment.primaryMetric.name": "tokens_per_s",
    "mlflow.experiment.primaryMetric.greaterIsBetter": "True",
}
NAME = "attributes.`Run Name`"
CREATED = "attributes.start_time"
IMPROVEMENT = "improvement_pct"
"""Metric of a variant: its effect, positive for an improvement in either direction of its metric."""


class SavedView(NamedTuple):
    """One view: the kind of runs that it lists, and their columns."""

    id: str
    name: str
    kind: RunKind
    columns: Mapping[str, int]
    """Columns after the run's name, from left to right, with their widths in pixels."""
    order_by: str
    name_width: int


def _tag(name: str) -> str:
    return f"tags.`ablation.{name}`"


def _metric(name: str) -> str:
    return f"metrics.`{name}`"


ABLATIONS = SavedView(
    id="ablations",
    name="Ablations",
    kind=RunKind.ABLATION,
    columns={_tag("verdict"): 165, _tag("effect"): 115, _tag("interval"): 195, _tag("metric"): 125, _tag("gates"): 145},
    order_by=CREATED,
    name_width=250,
)
VARIANTS = SavedView(
    id="variants",
    name="Variants",
    kind=RunKind.ARM,
    columns={
        _tag("verdict"): 130,
        _metric("effect_pct"): 100,
        _metric("ci_low_pct"): 100,
        _metric("ci_high_pct"): 100,
        _tag("metric"): 150,
        _tag("name"): 130,
        _metric("tokens_per_s"): 120,
        _tag("decision"): 110,
        _tag("gates"): 230,
    },
    order_by=_metric(IMPROVEMENT),
    name_width=330,
)
SAVED_VIEWS = (ABLATIONS, VARIANTS)


def experiment_tags() -> dict[str, str]:
    """Return the initial tags of an experiment."""
    return EXPERIMENT_TAGS | {f"{PREFIX}{one.id}": _value(one) for one in SAVED_VIEWS}


def tags_to_set(stored: Mapping[str, str]) -> dict[str, str]:
    """Return the tags missing from `stored`, and our outdated views, unless a person has changed them."""
    return {
        key: value
        for key, value in experiment_tags().items()
        if key not in stored or (key.startswith(PREFIX) and stored[key] != value and _is_ours(stored[key], value))
    }


def _is_ours(stored: str, value: str) -> bool:
    """Return whether a stored view differs from ours in its state only, so no person has changed or renamed it."""
    try:
        old = json.loads(stored)
    except ValueError:
        return False
    new = json.loads(value)
    return isinstance(old, dict) and {**old, "state": ""} == {**new, "state": ""}


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
        "columnOrder": [NAME, *one.columns],
        "columnWidths": {NAME: one.name_width, **one.columns},
    }
