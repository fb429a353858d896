"""The route of the schema of a spec."""

import json
from functools import lru_cache
from typing import Any

from fastapi import APIRouter, Response

from ablate.experiments.design.spec import ablation_json_schema
from ablate.service.http.responses import problems

router = APIRouter(prefix="/v1", tags=["catalogue"])


@router.get(
    "/schema/ablation.json",
    operation_id="getSpecSchema",
    summary="The JSON Schema of a spec",
    response_model=dict[str, Any],
    responses=problems(),
)
async def get_spec_schema() -> Response:
    """Return the schema with which editors and other tools check a spec file."""
    return Response(_spec_schema(), media_type="application/json")


@lru_cache(maxsize=1)
def _spec_schema() -> bytes:
    """Return the schema as JSON, from a cache, because anybody may ask for it."""
    return json.dumps(ablation_json_schema()).encode()
