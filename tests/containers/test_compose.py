"""`make test-containers`: the images run together, and an ablation lives through a restart of every one of them.

Minutes long and in need of a container engine and of built images, so it is no part of `make test`.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.containers import compose_stack as stack
from tests.mlflow_contents import contents

pytestmark = [pytest.mark.timeout(3000), pytest.mark.skipif(stack.why_not() is not None, reason=str(stack.why_not()))]

SPEC = Path(__file__).with_name("six-blocks.yaml")
MLFLOW = "http://127.0.0.1:8322"
DUMP = "/var/lib/postgresql/dump"
RESTARTED = ("redis", "api", "background", "mlflow", "gateway", "postgres", "worker-cpu")


@pytest.fixture(scope="module")
def environment():
    with stack.running() as variables:
        yield variables


def ablate(environment: dict[str, str], *words: str) -> str:
    program = [str(Path(sys.executable).with_name("ablate")), *words]
    found = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert found.returncode in range(5), found.stderr
    return found.stdout


def get(environment: dict[str, str], path: str) -> dict[str, Any]:
    """Return an answer of the API; {} while no part of it answers."""
    headers = {"Authorization": f"Bearer {environment['ABLATE_TOKEN']}"}
    try:
        answer = httpx.get(environment["ABLATE_URL"] + path, headers=headers, timeout=10)
        return answer.json() if answer.status_code == httpx.codes.OK else {}
    except httpx.TransportError:
        return {}


def done(ablation: dict[str, Any]) -> int:
    return ablation.get("blocks", {}).get("done", 0)


def over(ablation: dict[str, Any]) -> dict[str, Any] | None:
    return ablation if ablation.get("state") in {"completed", "failed"} else None


def eventually(look, what: str, patience_s: float = 300.0):
    deadline = time.monotonic() + patience_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what} did not happen within {patience_s:.0f} s"
        time.sleep(1)
    return found


def test_every_part_answers(environment):
    eventually(lambda: get(environment, "/readyz").get("degraded") == [], "readiness")
    eventually(lambda: "compose-cpu" in ablate(environment, "nodes", "--json"), "the worker's registration")


@pytest.mark.parametrize("service", ["api", "background", "mlflow", "worker-cpu"])
def test_no_process_is_root_and_no_secret_is_in_an_environment(environment, service):
    assert stack.engine("exec", stack.container(service), "id", "-u").strip() == "10001"
    shown = stack.engine("inspect", stack.container(service)) + stack.engine("logs", stack.container(service))
    for secret in (stack.ROOT / "secrets").glob("*"):
        assert secret.read_text() not in shown, secret.name


@pytest.mark.parametrize("service", ["api", "background", "mlflow"])
def test_the_root_of_a_service_cannot_be_written(environment, service):
    said = stack.engine(
        "exec", stack.container(service), "sh", "-c", "touch /opt/x 2>&1; touch /etc/x 2>&1", check=False
    )
    assert said.count("Read-only file system") + said.count("Permission denied") == 2


def test_a_worker_cannot_reach_the_database(environment):
    address = stack.engine(
        "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", stack.container("postgres")
    ).strip()

    def reached(service: str, host: str) -> bool:
        look = f"import socket; socket.create_connection(({host!r}, 5432), timeout=3); print('reached')"
        said = stack.engine("exec", stack.container(service), "python", "-c", look, check=False)
        return said.strip().endswith("reached")

    assert reached("api", "postgres")
    assert reached("api", address)
    assert not reached("worker-cpu", "postgres")
    assert not reached("worker-cpu", address)


def test_an_ablation_lives_through_a_restart_of_every_part(environment):
    name = json.loads(ablate(environment, "submit", str(SPEC), "--json"))["id"]
    path = f"/v1/ablations/{name}"
    for number, service in enumerate(RESTARTED):
        wanted = min(number, 5)
        eventually(lambda wanted=wanted: done(get(environment, path)) >= wanted, f"block {wanted}", 600)
        stack.engine("restart", "-t", "10", stack.container(service))
    final = eventually(lambda: over(get(environment, path)), "the end", 900)
    assert final["state"] == "completed"
    trials = get(environment, f"{path}/trials?limit=100")["items"]
    assert {block["state"] for block in get(environment, f"{path}/blocks")["items"]} == {"done"}
    assert len({trial["id"] for trial in trials}) == len(trials) == 12
    verdict = eventually(lambda: get(environment, f"{path}/verdict"), "the verdict")
    assert verdict["blocks_counted"] == 6
    url = eventually(lambda: get(environment, path).get("mlflow_url"), "the projection", 400)
    assert url.startswith("http://127.0.0.1:8322/")
    assert httpx.get("http://127.0.0.1:8322/health", timeout=5).text == "OK"


def test_the_database_is_restored_from_a_dump_and_mlflow_is_made_anew(environment):
    (before,) = json.loads(ablate(environment, "list", "--json"))
    shown = contents(MLFLOW)
    in_postgres = ("exec", stack.container("postgres"))
    stack.engine(*in_postgres, "pg_dump", "-U", "postgres", "-Fc", "-f", DUMP, "ablate")
    later = json.loads(ablate(environment, "submit", str(SPEC), "--json"))["id"]
    for service in ("api", "background"):
        stack.engine("stop", "-t", "10", stack.container(service))
    stack.engine(*in_postgres, "dropdb", "-U", "postgres", "--force", "ablate")
    stack.engine(*in_postgres, "createdb", "-U", "postgres", "-O", "ablate", "ablate")
    stack.engine(*in_postgres, "pg_restore", "-U", "postgres", "-d", "ablate", DUMP)
    for service in ("api", "background"):
        stack.engine("start", stack.container(service))
    eventually(lambda: get(environment, "/readyz").get("ready"), "readiness")
    assert [row["id"] for row in json.loads(ablate(environment, "list", "--json"))] == [before["id"]]
    assert get(environment, f"/v1/ablations/{later}") == {}
    stack.engine("exec", stack.container("background"), "ablate", "mlflow", "rebuild", timeout_s=300)
    again = contents(MLFLOW)
    assert {key: run for key, run in again.items() if key[0] == before["id"]} == shown
    made = json.loads(ablate(environment, "submit", str(SPEC), "--json"))["id"]
    path = f"/v1/ablations/{made}"
    eventually(lambda: done(get(environment, path)) >= 1, "a block by the worker, which stayed up meanwhile", 300)
    ablate(environment, "cancel", made)


def test_the_api_scales(environment):
    if stack.ENGINE != "docker":
        pytest.skip("scaling was not tried with podman-compose")
    stack.compose("up", "-d", "--no-build", "--scale", "api=2", "api")
    for _ in range(50):
        assert httpx.get(f"{environment['ABLATE_URL']}/healthz", timeout=5).text == "ok"
