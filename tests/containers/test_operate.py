"""`make test-containers`, second part: backup, restore, scaling and upgrade, by the commands of docs/operate.md."""

import json
import threading
import time

import httpx
import pytest
import yaml

from tests.containers import compose_stack as stack
from tests.containers.asking import (
    CLIENT,
    SPEC,
    ablate,
    answer,
    done,
    eventually,
    get,
    get_if_up,
    headers,
    mlflow_url,
    outbox_rows,
)
from tests.mlflow_contents import contents

pytestmark = [pytest.mark.timeout(3000), pytest.mark.skipif(stack.why_not() is not None, reason=str(stack.why_not()))]

REQUESTS = (
    "import urllib.request as u; lines = u.urlopen('http://127.0.0.1:8321/metrics').read().decode().splitlines();"
    "print(sum(float(l.split()[-1]) for l in lines if l.startswith('ablate_requests_total') and '\"/version\"' in l))"
)


def test_the_database_is_restored_from_a_dump_and_mlflow_is_made_anew(environment, tmp_path):
    (before,) = json.loads(ablate(environment, "list", "--json"))
    eventually(lambda: outbox_rows() == 0, "the projection", 400)
    shown = contents(mlflow_url())
    assert shown
    dump, *restore = stack.documented("Backup and restore")
    stack.typed(dump, tmp_path)
    later = json.loads(ablate(environment, "run", str(SPEC), "--json", "--detach"))["id"]
    for command in restore:
        stack.typed(command, tmp_path)
    eventually(lambda: get_if_up(environment, "/readyz").get("ready"), "readiness")
    assert [row["id"] for row in json.loads(ablate(environment, "list", "--json"))] == [before["id"]]
    assert answer(environment, f"/v1/ablations/{later}").status_code == httpx.codes.NOT_FOUND
    eventually(lambda: outbox_rows() == 0, "the projection after the restore", 400)
    again = contents(mlflow_url())
    assert {key: run for key, run in again.items() if key[0] == before["id"]} == shown
    made = json.loads(ablate(environment, "run", str(SPEC), "--json", "--detach"))["id"]
    path = f"/v1/ablations/{made}"
    eventually(lambda: done(get_if_up(environment, path)) >= 1, "a block by the worker, which stayed up meanwhile", 300)
    ablate(environment, "cancel", made)


def answered(name: str) -> float:
    """Return how often one process of the API was asked for its version."""
    return float(stack.engine("exec", name, "python", "-c", REQUESTS))


def ask(environment: dict[str, str], times: int) -> None:
    for _ in range(times):
        assert CLIENT.get(f"{environment['ABLATE_URL']}/version", timeout=10).status_code == httpx.codes.OK


def test_the_gateway_asks_every_api_and_goes_on_when_one_is_gone(environment):
    before = {name: answered(name) for name in stack.containers("api")}
    ask(environment, 40)
    assert all(answered(name) - count >= 5 for name, count in before.items())
    first, second = before
    for gone, left in ((first, second), (second, first)):
        stack.engine("stop", "-t", "0", gone)
        count = answered(left)
        ask(environment, 20)
        assert answered(left) - count == 20
        stack.engine("start", gone)
        stack.wait_healthy(gone)
        eventually(lambda gone=gone: ask(environment, 4) or answered(gone), "the gateway's look for processes")


class Submitter(threading.Thread):
    """Submits one spec after another through the gateway, each once."""

    def __init__(self, environment: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self.ids: list[str] = []
        self.odd: list[str] = []
        self.over = threading.Event()
        self._url, self._headers = f"{environment['ABLATE_URL']}/v1/ablations", headers(environment)

    def run(self) -> None:
        number = 0
        while not self.over.wait(0.3):
            number += 1
            self._submit(f"upgrade-{number}")

    def _submit(self, key: str) -> None:
        values = {**yaml.safe_load(SPEC.read_text()), "ablation": key}
        began = time.monotonic()
        try:
            answer = CLIENT.post(self._url, json=values, headers={**self._headers, "Idempotency-Key": key}, timeout=30)
        except httpx.TransportError as error:
            self.odd.append(f"{key}: {error!r} after {time.monotonic() - began:.1f} s")
            return
        if answer.is_success:
            self.ids.append(answer.json()["id"])
        else:
            self.odd.append(f"{key}: {answer.status_code} {answer.text} after {time.monotonic() - began:.1f} s")


@pytest.fixture
def newer_image(tmp_path):
    """Another image under the name of the service's, as a build of other code makes it; yield its id."""
    name = stack.images()[0]
    before = stack.image_id(name)
    (tmp_path / "Dockerfile").write_text(f'FROM {name}\nLABEL upgraded="yes"\n')
    stack.engine("build", "--quiet", "--tag", name, str(tmp_path))
    yield stack.image_id(name)
    stack.engine("tag", before, name)


def images_of_the_service() -> set[str]:
    names = [*stack.containers("api"), *stack.containers("background")]
    return {stack.engine("inspect", "--format", "{{.Image}}", name).strip() for name in names}


def test_an_upgrade_replaces_every_process_and_no_request_is_lost(environment, newer_image, tmp_path):
    build, look, *replace = stack.documented("Upgrade")[:4]
    assert build == "docker compose build"
    assert "no migration waits" in stack.typed(look, tmp_path)
    submitter = Submitter(environment)
    submitter.start()
    for command in replace:
        stack.typed(command, tmp_path)
    submitter.over.set()
    submitter.join(60)
    assert images_of_the_service() == {newer_image}
    assert submitter.odd == []
    assert len(submitter.ids) > 20
    assert all(get(environment, f"/v1/ablations/{one}")["id"] == one for one in submitter.ids)
    eventually(lambda: get_if_up(environment, "/readyz").get("degraded") == [], "readiness")


def test_an_upgrade_of_the_schema_stops_all_old_code_first(environment, newer_image, tmp_path):
    stop, migrate, start = stack.documented("Upgrade")[4:]
    stack.typed(stop, tmp_path)
    assert answer(environment, "/readyz").status_code in (httpx.codes.BAD_GATEWAY, httpx.codes.GATEWAY_TIMEOUT)
    assert "no migration waits" in stack.typed(migrate, tmp_path)
    stack.typed(start, tmp_path)
    assert images_of_the_service() == {newer_image}
    eventually(lambda: get_if_up(environment, "/readyz").get("degraded") == [], "readiness")
