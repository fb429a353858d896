"""Property tests of the whole interface from its own OpenAPI document, and the document itself, frozen."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CheckFunction
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode

from tests.api_stack import ADMIN, WORKER, Api, running_api

GOLDEN = Path(__file__).parents[1] / "golden" / "openapi.json"


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with running_api(request.param, tmp_path_factory.mktemp("fuzz"), rate_limit_per_s=1e6, rate_limit_burst=10**6) as api:
        yield api
