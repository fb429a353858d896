"""A real worker whose key is replaced, then revoked."""

from pathlib import Path

from experiments.outcomes import ExitCode
from tests.api_stack import Api, served_api
from tests.integration.worker_service import worker
from tests.waiting import until


def log_of(home: Path) -> str:
    return " ".join((home / "worker.log").read_text().split())


def seen_at(api: Api, name: str) -> str:
    return str(next(row["seen_at"] for row in api.get("/v1/nodes").json()["items"] if row["name"] == name))


def test_a_replaced_key_goes_on_and_a_revoked_one_ends_its_worker(tmp_path: Path) -> None:
    with served_api("sqlite", tmp_path) as api:
        url = str(api.client.base_url).rstrip("/")
        old = api.client.post("/v1/nodes", headers=api.admin, json={"name": "gpu-7", "node_class": "cpu"}).json()[
            "secret"
        ]
        with worker(tmp_path / "old", url, ABLATE_WORKER_TOKEN=old, ABLATE_NODE_NAME="gpu-7") as process:
            until(lambda: "asks for work" in log_of(tmp_path / "old"))
            rotated = api.client.post("/v1/nodes/gpu-7:rotate-key", headers=api.admin, json={"grace_s": 600})
            assert rotated.is_success
            before = seen_at(api, "gpu-7")
            until(lambda: seen_at(api, "gpu-7") > before)
            assert process.poll() is None, "the key before it still counts"
            answer = api.client.post("/v1/nodes/gpu-7:revoke-key", headers=api.admin, json={"reason": "sold"})
            assert answer.status_code == 204
            assert process.wait(120) == ExitCode.ERROR
        assert "the service answered 401: this key of node 'gpu-7' was revoked; an operator" in log_of(tmp_path / "old")
        assert old not in (tmp_path / "old" / "worker.log").read_text()
