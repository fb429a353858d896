"""Routes about the gates, the recipes and the schema of a spec."""

import json
from functools import lru_cache
from typing import Any

from fastapi import APIRouter, Response

from ablate.experiments.design.listings import GatePublic, RecipePublic, public_gates, public_recipes
from ablate.experiments.design.spec import ablation_json_schema
from ablate.service.http.deps import Reader
from ablate.service.http.responses import problems, secured

router = APIRouter(prefix="/v1", tags=["catalogue"])


@router.get("/gates", operation_id="listGates", summary="List every gate", responses=secured())
def list_gates(principal: Reader) -> list[GatePublic]:
    """Return every gate with its values and the node classes that can run them."""
    return public_gates()


@router.get("/recipes", operation_id="listRecipes", summary="List every recipe", responses=secured())
def list_recipes(principal: Reader) -> list[RecipePublic]:
    """Return every recipe with its gates and the values that a spec may override, those of packages last."""
    return public_recipes()


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
