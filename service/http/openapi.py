"""The OpenAPI document: FastAPI's own, plus the JSON Schema of a spec and complete examples."""

from typing import Any

import yaml
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from experiments.design.spec import ablation_json_schema
from service.http.links import below
from service.schemas.problems import Problem

DESCRIPTION = """Submit an ablation, watch it, and read its verdict.

Errors are RFC 9457 problem documents. Times are RFC 3339 UTC. Ids sort by time."""

TAGS = [
    {"name": "submissions", "description": "Plan and submit specs."},
    {"name": "ablations", "description": "Watch, list and cancel ablations; read specs, verdicts and reports."},
    {"name": "sessions", "description": "Many proposals, one after another, under one error budget."},
    {"name": "trials", "description": "Receipts and logs."},
    {"name": "catalogue", "description": "Gates and the schema of a spec."},
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
    "design": {"seeds": [1, 2, 3], "blocks": {"count": 6}, "order_seed": 20261120},
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
    spec = _moved(ablation_json_schema())
    schemas.update(spec.pop("$defs", {}))
    spec.pop("$schema", None)
    schemas["AblationSpec"] = spec
    problem = _moved(Problem.model_json_schema())
    schemas.update(problem.pop("$defs", {}))
    schemas["Problem"] = problem
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def _moved(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _moved_ref(key, inner) for key, inner in value.items()}
    return [_moved(inner) for inner in value] if isinstance(value, list) else value


def _moved_ref(key: str, value: Any) -> Any:
    if key == "$ref" and isinstance(value, str):
        return value.replace("#/$defs/", "#/components/schemas/")
    return _moved(value)
