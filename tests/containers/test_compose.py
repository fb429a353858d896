"""`make test-containers`: the images run together, and an ablation lives through a restart of every one of them.

Minutes long and in need of a container engine and of built images, so it is no part of `make test`.
"""

import json

import httpx
import pytest

from tests.containers import compose_stack as stack
from tests.containers.asking import SPEC, ablate, done, eventually, get, over

pytestmark = [pytest.mark.timeout(3000), pytest.mark.skipif(stack.why_not() is not None, reason=str(stack.why_not()))]

RESTARTED = (
    *(("redis", 1), ("api", 1), ("background", 1), ("mlflow", 1), ("gateway", 1)),
    *(("api", 2), ("background", 2), ("postgres", 1), ("worker-cpu", 1)),
)


def test_every_part_answers(environment):
    eventually(lambda: get(environment, "/readyz").get("degraded") == [], "readiness")
    eventually(lambda: "compose-cpu" in ablate(environment, "nodes", "--json"), "the worker's registration")


@pytest.mark.parametrize("service", ["api", "background", "mlflow", "worker-cpu"])
def test_no_process_is_root_and_no_secret_is_in_an_environment(environment, service):
    assert stack.engine("exec", stack.container(service), "id", "-u").strip() == "10001"
    shown = stack.engine("inspect", stack.container(service)) + stack.engine("logs", stack.container(service))
    for secret in (stack.ROOT / "secrets").glob("*"):
        assert secret.read_text() not in shown, secret.name


def test_a_worker_that_stands_still_is_unhealthy(environment):
    name = stack.container("worker-cpu")
    assert stack.is_healthy(name)
    stack.engine("kill", "--signal", "STOP", name)
    try:
        stack.engine("exec", name, "touch", "-d", "5 minutes ago", "/var/lib/ablate/alive")
        eventually(lambda: not stack.is_healthy(name), "the finding", 150)
    finally:
        stack.engine("kill", "--signal", "CONT", name)
    stack.wait_healthy(name)


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
    for turn, (service, number) in enumerate(RESTARTED):
        wanted = turn * 5 // (len(RESTARTED) - 1)
        eventually(lambda wanted=wanted: done(get(environment, path)) >= wanted, f"block {wanted}", 600)
        stack.engine("restart", "-t", "10", stack.container(service, number))
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
