"""What the published JSON Schema of a spec says beyond the types of its fields: which keys go with which."""

from typing import Any

from experiments.design.metrics import EXACT_METRICS, LOSS_METRICS, METRICS, PAIRED_METRICS
from experiments.design.spec_values import NO_MARGIN, PERCENT_PATTERN


def without_null(schema: dict[str, Any], *names: str) -> None:
    """Publish optional keys as present or absent, never null."""
    for name in names:
        given = schema["properties"][name]
        (kept,) = [option for option in given.pop("anyOf") if option != {"type": "null"}]
        given.pop("default", None)
        given.update(kept)


def primary_schema(schema: dict[str, Any]) -> None:
    """Publish which margin goes with which metric."""
    paired = {
        "properties": {"metric": {"enum": [*PAIRED_METRICS]}, "margin": {"type": "string", "pattern": PERCENT_PATTERN}}
    }
    directed = [name for name in EXACT_METRICS if METRICS[name].better]
    exact = {"required": ["metric"], "properties": {"metric": {"enum": directed}}}
    loss = {
        "required": ["metric"],
        "properties": {
            "metric": {"enum": [*LOSS_METRICS]},
            "margin": {"const": NO_MARGIN},
            "adopt_if": {"type": "null"},
        },
    }
    schema["oneOf"] = [paired, exact, loss]


def requirement_schema(schema: dict[str, Any]) -> None:
    """Publish that exactly one bound is given, and which rule goes with which metric."""
    without_null(schema, "max_delta", "max_value", "rule")
    loss = {"required": ["rule"], "properties": {"metric": {"enum": [*LOSS_METRICS]}}}
    schema["oneOf"] = [{"required": ["max_delta"]}, {"required": ["max_value"]}, loss]


def nested(schema: dict[str, Any], *path: str) -> dict[str, Any]:
    """Return the schema of a mapping whose value at `path` has `schema`, where it is there."""
    for name in reversed(path):
        schema = {"properties": {name: schema}}
    return schema
