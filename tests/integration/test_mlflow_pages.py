"""MLflow's pages through the API: signed-in people read them, nobody changes anything, strangers see nothing."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ablate.service.web.mlflow_pages import _READS
from ablate.service.web.sessions import COOKIE
from tests import mlflow_server
from tests.api_stack import ADMIN, Api, bearer, nobody_url, running_api
from tests.waiting import LIMIT_S
from tests.web_pages import Person

SEARCH = "/mlflow/ajax-api/2.0/mlflow/runs/search"


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("home") / "mlflow"
    folder.mkdir()
    with mlflow_server.running(folder) as url:
        yield url


@pytest.fixture(scope="module")
def api(mlflow: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("api")
    with running_api("sqlite", folder, mlflow_url=mlflow, forward_mlflow=True) as running:
        yield running


@pytest.fixture(scope="module")
def run_id(mlflow: str) -> str:
    """A run with an HTML file."""
    with httpx.Client(base_url=mlflow, timeout=LIMIT_S, trust_env=False) as server:
        body = {"experiment_id": "0", "start_time": 1, "run_name": "planted"}
        info = server.post("/api/2.0/mlflow/runs/create", json=body).json()["run"]["info"]
        files = info["artifact_uri"].replace("mlflow-artifacts:/", "/api/2.0/mlflow-artifacts/artifacts/")
        server.put(f"{files}/report.html", content=b"<script>1</script>").raise_for_status()
    return str(info["run_id"])


def test_who_is_signed_in_reads_pages_runs_and_files_without_a_password(api: Api, run_id: str) -> None:
    person = Person.signed_in(api)
    page = person.get("/mlflow/")
    assert (page.status_code, "static-files/" in page.text) == (200, True)
    assert "script-src 'self'" in page.headers["content-security-policy"]
    script = re.findall(r'src="(static-files/[^"]+)"', page.text)[0]
    assert person.get(f"/mlflow/{script}").headers["content-type"].startswith("text/javascript")
    runs = person.send("POST", SEARCH, json={"experiment_ids": ["0"]}).json()["runs"]
    assert [run["info"]["run_name"] for run in runs] == ["planted"]
    file = person.get(f"/mlflow/get-artifact?run_uuid={run_id}&path=report.html")
    assert (file.status_code, file.text) == (200, "<script>1</script>")
    assert file.headers["content-security-policy"].startswith("sandbox;"), "of one origin with our pages"
    assert file.headers["x-content-type-options"] == "nosniff"
    moved = person.get("/mlflow")
    assert (moved.status_code, moved.headers["location"]) == (308, "/mlflow/")


def test_a_stranger_reads_nothing(api: Api, run_id: str) -> None:
    for headers in ({}, {"Cookie": f"{COOKIE}=guessed"}, bearer(ADMIN), {"Cookie": f"{COOKIE}={ADMIN}"}):
        for method, path in (("GET", "/mlflow"), ("GET", "/mlflow/"), ("GET", "/mlflow/version"), ("POST", SEARCH)):
            answer = api.client.request(method, path, headers=headers, follow_redirects=False)
            assert answer.status_code == 401, path
            assert "ablate open" in answer.text


READING = re.compile(
    r"_?(deprecated_)?(batch_)?(get|list|search|query|serve|health|version|download|graphql|calculate|filter)"
)
"""How names of MLflow's functions begin that change nothing."""


LISTED = """
import json, sys
from mlflow.server.fastapi_app import app
from mlflow.server.handlers import get_endpoints
rest = [(path, method, handler.__name__) for path, handler, methods in get_endpoints() for method in methods]
native = [(r.path, m, r.endpoint.__name__) for r in app.routes if hasattr(r, "endpoint") for m in r.methods]
json.dump(rest + native, sys.stdout)
"""


def endpoints() -> set[tuple[str, str, str]]:
    """Return every path of MLflow with its method and the name of its function."""
    done = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, check=True)
    return {(path, method, name) for path, method, name in json.loads(done.stdout)}


def test_of_all_that_mlflow_offers_only_what_reads_is_forwarded(api: Api) -> None:
    person, passed = Person.signed_in(api), []
    for path, method, name in sorted(endpoints()):
        concrete = re.sub(r"<[^>]*>|\{[^}]*\}", "x", path).removeprefix("/")
        pattern = _READS.get(method)
        if pattern is not None and pattern.fullmatch(concrete):
            passed.append((name, path))
        elif method != "HEAD":
            answer = person.send(method, f"/mlflow/{concrete}")
            assert answer.status_code in (403, 405), (method, path)
    assert len(passed) > 30
    assert [one for one in passed if not READING.match(one[0])] == []


@pytest.mark.parametrize(
    "path",
    [
        *(
            "ajax-api/3.0/mlflow/assistant/config",
            "ajax-api/2.0/mlflow/gateway-proxy",
            "gateway/x",
            "api/2.0/mlflow/runs/get",
        ),
        *("static-files/../ajax-api/3.0/mlflow/assistant/config", "static-files/%2e%2e/gateway/x", "//127.0.0.1:1/"),
        "ajax-api/2.0/mlflow/runs/../assistant/config",
    ],
)
def test_no_other_door_is_open(api: Api, path: str) -> None:
    assert Person.signed_in(api).get(f"/mlflow/{path}").status_code == 403


def test_a_service_with_another_mlflow_forwards_nothing_and_one_without_an_answer_says_so(tmp_path: Path) -> None:
    with running_api("sqlite", tmp_path / "a") as api:
        answer = Person.signed_in(api).get("/mlflow/")
        assert (answer.status_code, "does not forward MLflow" in answer.text) == (404, True)
    with running_api("sqlite", tmp_path / "b", mlflow_url=nobody_url(), forward_mlflow=True) as api:
        answer = Person.signed_in(api).get("/mlflow/")
        assert (answer.status_code, "nothing listens there" in answer.text) == (503, True)
