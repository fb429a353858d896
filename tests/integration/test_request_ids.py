"""One id from a submission to the worker that runs it and back: every log line about it can be found."""

import json
import logging
from pathlib import Path

import pytest

from ablate.experiments.records.identity import ClaimedBlock
from ablate.experiments.system.logs import LogFormat, configure_logging, requested_by
from ablate.workers.errors import ApiRefused, StaleLease
from ablate.workers.leases.service_api import ServiceApi
from tests.api_stack import WORKER, served_api
from tests.factories import spec_values


@pytest.fixture(autouse=True)
def _logging_stays_as_it_was():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_a_submission_is_followed_to_the_worker_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogFormat.JSON)
    given = "ci-run.42-7"
    with served_api("sqlite", tmp_path, log_requests=True) as api:
        headers = {**api.admin, "Idempotency-Key": "one", "X-Request-Id": given}
        answer = api.client.post("/v1/ablations", json=spec_values(), headers=headers)
        assert answer.headers["x-request-id"] == given
        assert api.get(answer.json()["links"]["self"]).json()["request_id"] == given
        raw = api.claimed(api.register())
        block = ClaimedBlock.model_validate(raw)
        assert block.request_id == given
        worker = ServiceApi(str(api.client.base_url), WORKER)
        with requested_by(block.request_id):
            logging.getLogger("ablate.workers.leases.supervisor").info("block %s", block.block_id)
            with pytest.raises((ApiRefused, StaleLease)):
                worker.register("no name!", None)  # type: ignore[arg-type]  # refused before it is read
        worker.close()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    ours = [(line["logger"], line["message"]) for line in lines if line.get("request_id") == given]
    assert ("ablate.workers.leases.supervisor", f"block {block.block_id}") in ours
    served = [message for logger, message in ours if logger == "ablate.service.http.middleware"]
    assert served[0].startswith("POST '/v1/ablations' 202 in ")
    assert served[-1].startswith("PUT '/v1/nodes/no name!' 4")


def test_what_nobody_submitted_over_the_network_has_no_request(tmp_path: Path) -> None:
    with served_api("sqlite", tmp_path) as api:
        made = api.submit()
        shown = api.get(made["links"]["self"]).json()["request_id"]
    assert shown.startswith("req_")
