"""The embedded MLflow server: nobody gets in without its password, and with it nobody reaches a file outside.

The attacks are those of a trial: it writes links into its own folder and names that folder as the place of artifacts.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ablate.experiments.system.setting_values import without_credentials
from ablate.workers.isolation.reach import isolation_problem
from tests import mlflow_server
from tests.waiting import LIMIT_S

SECRET = "s3cret-of-this-user"
API = "/api/2.0/mlflow"


class World:
    """A running server, a secret beside its folder, and the folder of a trial with links out of it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.secret, self.trial = folder / "tokens" / "admin", folder / "work" / "trial"
        for path in (self.secret.parent, self.trial):
            path.mkdir(parents=True)
        self.secret.write_text(SECRET)
        (self.trial / "out").symlink_to(folder)
        (self.trial / "file").symlink_to(self.secret)
        self.folder, self.url = folder, url
        self.client = httpx.Client(base_url=url, timeout=LIMIT_S, trust_env=False)

    def files(self) -> set[Path]:
        """Return all files except the server's own."""
        home = self.folder / "mlflow"
        return {path for path in self.folder.rglob("*") if path.is_file() and not path.is_relative_to(home)}

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Call MLflow's REST interface."""
        return dict(self.client.post(API + path, json=body).json())

    def run_at(self, location: str) -> str:
        """Return a new run whose artifacts are to be at `location`; "" if MLflow refuses already."""
        name = f"e{os.urandom(6).hex()}"
        experiment = self.post("/experiments/create", name=name, artifact_location=location).get("experiment_id")
        if experiment is None:
            return ""
        return str(self.post("/runs/create", experiment_id=experiment, start_time=1)["run"]["info"]["run_id"])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("home")
    (folder / "mlflow").mkdir()
    with mlflow_server.running(folder / "mlflow") as url:
        made = World(folder, url)
        yield made
        made.client.close()


PATHS = [
    *("/", "/health", "/version", "/graphql", "/static-files/index.html", "/get-artifact", "/ajax-api/2.0/mlflow/x"),
    *(f"{API}/experiments/search", f"{API}/runs/search", "/api/2.0/mlflow-artifacts/artifacts/1/x"),
    *(
        "/ajax-api/3.0/mlflow/assistant/config",
        "/ajax-api/3.0/mlflow/assistant/message",
        "/gateway/x/mlflow/invocations",
    ),
    *("/v1/traces", "/ajax-api/3.0/jobs/x", "/api/3.0/mlflow/server-info", "/%2e%2e/health", "//health"),
]


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(PATHS),
    method=st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE"]),
    sent=st.sampled_from(
        ["", "Basic", "Basic Og==", "Basic YWJsYXRlOg==", "Bearer x", "basic \xff", "Basic YWRtaW46cGFzc3dvcmQxMjM0"]
    ),
)
def test_nobody_gets_in_without_the_password(world: World, path: str, method: str, sent: str) -> None:
    headers = {"Authorization": sent.encode("latin-1")} if sent else {}
    answer = httpx.request(method, without_credentials(world.url) + path, headers=headers, trust_env=False)
    assert answer.status_code == 401, (method, path)
    assert "experiment" not in answer.text


def test_with_the_password_runs_and_their_files_work(world: World) -> None:
    run = world.run_at("")
    put = world.client.put("/api/2.0/mlflow-artifacts/artifacts/own/note.txt", content=b"text")
    assert put.status_code == 200, put.text
    assert world.client.get("/api/2.0/mlflow-artifacts/artifacts/own/note.txt").text == "text"
    assert world.client.get(f"{API}/artifacts/list", params={"run_id": run}).json()["root_uri"].startswith("mlflow-art")
    assert (world.folder / "mlflow" / "artifacts" / "own" / "note.txt").read_text() == "text"


def locations(world: World) -> list[str]:
    trial, folder = world.trial, world.folder
    return [
        *(str(trial), f"file://{trial}", f"file://{trial}/out", str(folder), "/", "file:///etc", f"{trial}/out/tokens"),
        *(f"mlflow-artifacts:/../../{trial}", "mlflow-artifacts://127.0.0.1:1/", f"mlflow-artifacts:{trial}"),
        *(
            "s3://bucket",
            "http://127.0.0.1:1/",
            "ftp://127.0.0.1/",
            "sftp://localhost/",
            "hdfs://localhost/",
            "dbfs:/x",
        ),
        *(f"runs:/{'0' * 32}/x", "models:/m/1", f"./{'../' * 12}{trial}", f"file:{trial}", "r2://a", "gs://a", "."),
    ]


READ_PATHS = ("file", "out/tokens/admin", "admin", "tokens/admin", "passwd", "../tokens/admin", "%2e%2e/tokens/admin")


def test_an_artifact_location_of_a_trial_reads_and_writes_nothing_outside(world: World) -> None:
    before = world.files()
    for location in locations(world):
        run = world.run_at(location)
        for path in READ_PATHS if run else ():
            answers = [
                world.client.get("/get-artifact", params={"run_uuid": run, "path": path}),
                world.client.get(f"{API}/artifacts/list", params={"run_id": run, "path": path}),
                world.client.post(
                    "/ajax-api/2.0/mlflow/upload-artifact", params={"run_uuid": run, "path": path}, content=b"x"
                ),
                world.client.post(
                    "/ajax-api/2.0/mlflow/upload-artifact",
                    params={"run_uuid": run, "path": f"out/{path}"},
                    content=b"x",
                ),
                world.client.put(f"/api/2.0/mlflow-artifacts/artifacts/{run}/{path}", content=b"x"),
                world.client.get(f"/api/2.0/mlflow-artifacts/artifacts/{path}"),
                world.client.delete(f"/api/2.0/mlflow-artifacts/artifacts/{path}"),
            ]
            assert [a.text for a in answers if SECRET in a.text or "root:" in a.text] == [], (location, path)
    assert world.files() == before
    assert world.secret.read_text() == SECRET


def test_models_and_traces_at_a_trials_folder_read_nothing(world: World) -> None:
    world.post("/registered-models/create", name="m")
    for location in locations(world):
        world.post("/model-versions/create", name="m", source=location)
        version = world.client.get(
            "/model-versions/get-artifact", params={"name": "m", "version": "1", "path": "file"}
        ).text
        trace = world.post(
            "/traces",
            experiment_id="0",
            timestamp_ms=1,
            request_metadata=[],
            tags=[{"key": "mlflow.artifactLocation", "value": location}],
        )
        spans = json.dumps(trace)
        request_id = trace.get("trace_info", {}).get("request_id", "none")
        shown = world.client.get("/ajax-api/2.0/mlflow/get-trace-artifact", params={"request_id": request_id}).text
        assert SECRET not in version + spans + shown


INSIDE = """
import errno, os, socket, subprocess, sys
from pathlib import Path
from ablate.service.stack.mlflow_server import _shut_in
folder, port = Path(sys.argv[1]), int(sys.argv[2])
_shut_in(folder)
def attempt(name, action):
    try:
        print(name, repr(action()))
    except OSError as error:
        print(name, errno.errorcode[error.errno])
attempt("own", lambda: (folder / "mine").write_text("x"))
attempt("secret", (folder.parent / "tokens" / "admin").read_text)
attempt("link", lambda: (folder.parent / "work/trial/file").read_text())
attempt("beside", lambda: (folder.parent / "new").write_text("x"))
attempt("shared memory", lambda: Path("/dev/shm/of-mlflow").write_text("x"))
attempt("loopback", lambda: socket.create_connection(("127.0.0.1", port), timeout=1))
attempt("unix", lambda: socket.socket(socket.AF_UNIX).connect(str(folder / "socket")))
attempt("cat", lambda: subprocess.run(["cat", folder.parent / "tokens" / "admin"], capture_output=True).returncode)
"""


@pytest.mark.skipif(isolation_problem() is not None, reason=f"not isolated here: {isolation_problem()}")
def test_the_process_itself_reaches_nothing_outside(world: World) -> None:
    """A door in MLflow that this file does not know leads nowhere."""
    port = str(httpx.URL(world.url).port)
    command = [sys.executable, "-c", INSIDE, str(world.folder / "mlflow"), port]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answers = dict(line.split() for line in done.stdout.splitlines() if " memory" not in line)
    assert answers == {
        **dict.fromkeys(("secret", "link", "beside"), "EACCES"),
        **dict.fromkeys(("loopback", "unix"), "EPERM"),
        **{"own": "1", "cat": "1"},
    }
    assert "shared memory EACCES" in done.stdout
