"""The OpenAPI document: FastAPI's own, plus the JSON Schema of a spec and complete examples."""

from typing import Any

import yaml
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ablate.experiments.design.spec import ablation_json_schema
from ablate.service.http.links import below
from ablate.service.schemas.ablations import Event, LogPiece, StreamEnd
from ablate.service.schemas.problems import Problem

DESCRIPTION = """Submit an ablation, watch it, and read its verdict.

Errors are RFC 9457 problem documents. Times are RFC 3339 UTC. Ids sort by time.

Of a spec this document has the types, so that generators of clients understand it. Conditions between its keys are in
`GET /v1/schema/ablation.json`."""

TAGS = [
    {"name": "submissions", "description": "Plan and submit specs."},
    {"name": "ablations", "description": "Watch, list and cancel ablations; read specs, verdicts and reports."},
    {"name": "sessions", "description": "Many proposals, one after another, under one error budget."},
    {"name": "trials", "description": "Receipts and logs."},
    {"name": "catalogue", "description": "The schema of a spec."},
    {"name": "calibrations", "description": "The measured noise of nodes."},
    {"name": "nodes", "description": "The machines that run trials, and their keys."},
    {"name": "tokens", "description": "Tokens of people, quotas, identities and sign-in links."},
    {"name": "workers", "description": "For workers, with the key of their node and an attempt's token."},
    {"name": "health", "description": "For operators; no token needed."},
]

JSON_EXAMPLE: dict[str, Any] = {
    "ablation": "psiv-cache",
    "question": "Does caching PsiV raise step throughput without costing memory or loss?",
    "workload": {"recipe": "hybrid-tiny", "steps": {"warmup": 2, "timed": 6}},
    "baseline": {"gates": {"schedule": "chunk_parallel", "chunk_size": 16}},
    "variants": {"psiv-on": {"gates": {"psiv_cache": True}}, "chunk-32": {"gates": {"chunk_size": 32}}},
    "design": {"seeds": 3, "blocks": {"count": 6}, "order_seed": 20261120},
    "placement": {"node_class": "cpu", "devices": 1},
    "limits": {"trial": "20m", "device_minutes": 180, "priority": 50},
    "verdict": {
        "primary": {"metric": "tokens_per_s", "margin": "2%", "adopt_if": "5%"},
        "require": [{"metric": "loss_step1", "max_delta": 0.001}],
    },
    "labels": {"team": "kernels"},
}

YAML_EXAMPLE = yaml.safe_dump(JSON_EXAMPLE, sort_keys=False)


def install(app: FastAPI) -> None:
    """Make `app.openapi()` return our document."""

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _build(app)
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


def _build(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes, tags=TAGS)
    if below(""):
        document["servers"] = [{"url": below("")}]
    schemas = document["components"]["schemas"]
    spec = _types_only(_moved(ablation_json_schema()))
    schemas.update(spec.pop("$defs", {}))
    spec.pop("$schema", None)
    schemas["AblationSpec"] = spec
    for model in (Problem, Event, LogPiece, StreamEnd):
        schema = _moved(model.model_json_schema())
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


_CONDITIONS = frozenset({"if", "then", "else", "not", "patternProperties"})
_UNIONS = frozenset({"anyOf", "oneOf", "allOf"})
_TYPES = {bool: "boolean", int: "integer", str: "string"}


def _types_only(value: Any, *, is_names: bool = False) -> Any:
    """Return a schema without conditions between keys, which generators of clients take for types of their own.

    The result accepts everything that the schema accepts. `is_names` if the keys are names of properties.
    """
    if isinstance(value, list):
        return [_types_only(item) for item in value]
    if not isinstance(value, dict):
        return value
    if is_names:
        return {name: _types_only(inner) for name, inner in value.items()}
    is_typed = "type" in value or "properties" in value
    dropped = _CONDITIONS | _UNIONS if is_typed else _CONDITIONS
    kept = {key: _types_only(inner, is_names=key == "properties") for key, inner in value.items() if key not in dropped}
    if len(patterns := value.get("patternProperties", {})) == 1:  # other names are not allowed: `propertyNames`
        kept["additionalProperties"] = _types_only(next(iter(patterns.values())))
    return kept if is_typed else _typed(kept)


def _typed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a constant, the enum of a gate, or a union of listed words and a pattern, with its type.

    The default of a gate is dropped: it is the model's, and a client that sends it asks for something else.
    """
    options = schema.get("anyOf", ())
    if options and all(option.keys() <= {"enum", "pattern"} for option in options):
        words = [word for option in options for word in option.get("enum", ())]
        return {**{key: inner for key, inner in schema.items() if key != "anyOf"}, "type": "string", "examples": words}
    values = schema.get("enum", [schema[key] for key in ("const",) if key in schema])
    if not values:
        return schema
    kept = {key: inner for key, inner in schema.items() if key != "default"}
    if isinstance(values[0], bool):  # generators would compare it with the words "false" and "true"
        kept.pop("enum", None)
    return {**kept, "type": _TYPES[type(values[0])]}


def _moved(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _moved_ref(key, inner) for key, inner in value.items()}
    return [_moved(inner) for inner in value] if isinstance(value, list) else value


def _moved_ref(key: str, value: Any) -> Any:
    if key == "$ref" and isinstance(value, str):
        return value.replace("#/$defs/", "#/components/schemas/")
    return _moved(value)
