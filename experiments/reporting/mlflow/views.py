"""Saved views of MLflow's list of runs, seeded: an experiment opens with the answers instead of every trial.

MLflow keeps a saved view as a tag of the experiment: a name, a time, and the page's state as JSON. Where a person
changes it, MLflow adds when (`updatedAt`): from then on it is theirs. One that nobody has changed follows its seed.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.digest import canonical_json
from experiments.reporting.mlflow.content import KIND_TAG, RunKind

PREFIX = "mlflow.sharedViewState."
CREATED_AT_MS = 1_795_000_000_000
"""The same for every projection; the views are listed by it."""
EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    "mlflow.experiment.primaryMetric.name": "tokens_per_s",
    "mlflow.experiment.primaryMetric.greaterIsBetter": "True",
}
NAME = "attributes.`Run Name`"
CREATED = "attributes.start_time"
IMPROVEMENT = "improvement_pct"
"""Metric of a variant: its effect, positive where it is for the better, whichever way its metric goes."""


class SavedView(NamedTuple):
    """One view: which kind of runs it lists, and their columns."""

    id: str
    name: str
    kind: RunKind
    columns: Mapping[str, int]
    """Beside the runs' names, from left to right, with their widths in pixels."""
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
    columns={_tag("metric"): 125, _tag("verdict"): 165, _tag("effect"): 135, _tag("interval"): 195, _tag("gates"): 145},
    order_by=CREATED,
    name_width=355,
)
VARIANTS = SavedView(
    id="variants",
    name="Variants",
    kind=RunKind.ARM,
    columns={
        _tag("name"): 130,
        _tag("metric"): 150,
        _tag("verdict"): 110,
        _metric("effect_pct"): 100,
        _metric("ci_low_pct"): 100,
        _metric("ci_high_pct"): 100,
        _metric("tokens_per_s"): 120,
        _tag("decision"): 110,
        _tag("gates"): 230,
    },
    order_by=_metric(IMPROVEMENT),
    name_width=330,
)
SAVED_VIEWS = (ABLATIONS, VARIANTS)


def experiment_tags() -> dict[str, str]:
    """Return the tags that an experiment begins with."""
    return EXPERIMENT_TAGS | {f"{PREFIX}{one.id}": _value(one) for one in SAVED_VIEWS}


def tags_to_set(there: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that an experiment with the tags `there` lacks, and the views that are an older seed of ours."""
    return {
        key: value
        for key, value in experiment_tags().items()
        if key not in there or (key.startswith(PREFIX) and there[key] != value and _is_seed_of(value, there[key]))
    }


def _is_seed_of(value: str, found: str) -> bool:
    """Tell whether a view was seeded under the same name, and no person has changed or renamed it since."""
    try:
        old = json.loads(found)
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
