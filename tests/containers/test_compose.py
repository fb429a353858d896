"""`make test-containers`: the images run together, and an ablation lives through a restart of every one of them.

Minutes long and in need of a container engine and of built images, so it is no part of `make test`.
"""

import json

import httpx
import pytest

from tests.containers import compose_stack as stack
from tests.containers.asking import (
    CLIENT,
    SPEC,
    ablate,
    done,
    eventually,
    get,
    get_if_up,
    mlflow_url,
    outbox_rows,
    over,
)

pytestmark = [pytest.mark.timeout(3000), pytest.mark.skipif(stack.why_not() is not None, reason=str(stack.why_not()))]

RUNNING = [service for service in stack.SERVICES if service != "migrate"]
RESTARTED = (
    *(("redis", 1), ("api", 1), ("background", 1), ("mlflow", 1), ("gateway", 1)),
    *(("api", 2), ("background", 2), ("postgres", 1), ("worker-cpu", 1)),
)


def test_every_part_answers(environment):
    eventually(lambda: get_if_up(environment, "/readyz").get("degraded") == [], "readiness")
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


@pytest.mark.parametrize("service", RUNNING)
def test_a_container_has_a_closed_root_no_rights_and_limits(environment, service):
    name = stack.container(service)
    refusals = stack.engine("exec", name, "sh", "-c", "touch /opt/x 2>&1; touch /etc/x 2>&1", check=False)
    assert refusals.count("Read-only file system") == 2
    rights = stack.engine("exec", name, "grep", "-E", "CapEff|CapBnd|NoNewPrivs", "/proc/1/status").split()
    assert rights == ["CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]
    assert stack.engine("exec", name, "id", "-u").strip() != "0"
    limits = "{{.HostConfig.Memory}} {{.HostConfig.PidsLimit}}"
    assert min(map(int, stack.engine("inspect", "--format", limits, name).split())) > 0


def address(service: str) -> list[str]:
    shown = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}"
    return stack.engine("inspect", "--format", shown, stack.container(service)).split()


@pytest.mark.parametrize(("service", "port"), [("postgres", 5432), ("mlflow", 8322)])
def test_a_worker_cannot_reach_database_and_mlflow(environment, service, port):
    def reached(client: str, host: str) -> bool:
        look = f"import socket; socket.create_connection(({host!r}, {port}), timeout=3); print('reached')"
        output = stack.engine("exec", stack.container(client), "python", "-c", look, check=False)
        return output.strip().endswith("reached")

    assert reached("api", service)
    assert any(reached("api", one) for one in address(service))
    assert not any(reached("worker-cpu", one) for one in (service, *address(service)))


def test_mlflow_asks_everybody_for_a_password(environment):
    """The gateway forwards MLflow for people; workers can reach it there too."""
    search = "/api/2.0/mlflow/experiments/search?max_results=5"
    look = (
        "import urllib.request as u, urllib.error as e\n"
        f"try: print(u.urlopen('http://gateway:8322{search}', timeout=10).status)\n"
        "except e.HTTPError as error: print(error.code)"
    )
    for path in ("/", search, "/graphql"):
        assert CLIENT.get(f"http://127.0.0.1:8322{path}", timeout=20).status_code == httpx.codes.UNAUTHORIZED, path
    assert stack.engine("exec", stack.container("worker-cpu"), "python", "-c", look).strip() in ("401", "403")
    assert CLIENT.get(mlflow_url() + search, timeout=20).status_code == httpx.codes.OK
    password = stack.engine("exec", stack.container("mlflow"), "mlflow-accounts", "add", "ada").splitlines()[0]
    person = ("ada", password)
    assert CLIENT.get(f"http://127.0.0.1:8322{search}", auth=person, timeout=20).status_code == httpx.codes.OK
    made = CLIENT.post("http://127.0.0.1:8322/api/2.0/mlflow/runs/create", auth=person, json={"experiment_id": "0"})
    assert made.status_code == httpx.codes.FORBIDDEN
    stack.engine("exec", stack.container("mlflow"), "mlflow-accounts", "remove", "ada")


def test_an_ablation_lives_through_a_restart_of_every_part(environment):
    name = json.loads(ablate(environment, "run", str(SPEC), "--json", "--detach"))["id"]
    path = f"/v1/ablations/{name}"
    for turn, (service, number) in enumerate(RESTARTED):
        count = turn * 5 // (len(RESTARTED) - 1)
        eventually(lambda count=count: done(get_if_up(environment, path)) >= count, f"block {count}", 600)
        stack.engine("restart", "-t", "10", stack.container(service, number))
    final = eventually(lambda: over(get_if_up(environment, path)), "the end", 900)
    assert final["state"] == "completed"
    trials = get(environment, f"{path}/trials?limit=100")["items"]
    assert {block["state"] for block in get(environment, f"{path}/blocks")["items"]} == {"done"}
    assert len({trial["id"] for trial in trials}) == len(trials) == 12
    verdict = eventually(lambda: get_if_up(environment, f"{path}/verdict"), "the verdict")
    assert verdict["blocks_counted"] == 6
    url = eventually(lambda: get_if_up(environment, path).get("mlflow_url"), "the projection", 400)
    assert url.startswith("http://127.0.0.1:8322/")
    eventually(lambda: outbox_rows() == 0, "the rest of the projection", 400)
