"""A real worker with a problem, and a real service that keeps the quarantine until an operator resumes the node."""

from pathlib import Path
from typing import Any

import pytest

from tests.api_stack import Api, served_api
from tests.integration.worker_service import corpus, worker
from tests.waiting import until

_NAME = "tester"
_OVERRIDES = {"d_model": 32, "headdim": 16, "d_state": 16, "seq_len": 64, "vocab_size": 512, "threads": 1}


def _node(api: Api) -> dict[str, Any]:
    (node,) = [item for item in api.get("/v1/nodes").json()["items"] if item["name"] == _NAME] or [{}]
    return dict(node)


@pytest.mark.timeout(600)
def test_quarantine_outlives_its_reason_until_an_operator_resumes(tmp_path: Path) -> None:
    with served_api("sqlite", tmp_path) as api:
        key = api.worker_of(_NAME)["Authorization"].removeprefix("Bearer ")
        url = str(api.client.base_url).rstrip("/")
        made = api.submit(
            workload__overrides={**_OVERRIDES, "corpus": str(corpus(tmp_path / "corpus"))},
            workload__steps={"warmup": 1, "warmup_s": 0, "timed": 3, "val_rows": 2},
        )
        home, more = tmp_path / "node", {"ABLATE_WORKER_TOKEN": key, "ABLATE_NODE_NAME": _NAME}
        with worker(home, url, ABLATE_LEAST_DISK_GIB="1000000", **more):
            shown = until(lambda: _node(api))
            assert (shown["state"], shown["health"]) == ("quarantined", "live")
            assert "GiB are free at" in shown["quarantined_reason"]
        with worker(home, url, **more):
            until(lambda: (home / "worker.log").read_text().count("asks for work") == 2)
            assert _node(api)["state"] == "quarantined"
            assert api.get(made["links"]["self"]).json()["blocks"]["done"] == 0
            assert _node(api)["runs"] == []
            answer = api.client.post(f"/v1/nodes/{_NAME}:resume", headers=api.admin)
            assert answer.is_success, answer.text
            until(lambda: _node(api)["runs"] or api.get(made["links"]["self"]).json()["blocks"]["done"])
            assert _node(api)["state"] == "works"
