"""A worker's block after SIGTERM, and its report when the service does not accept it."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ablate.model.config import StepsConfig
from ablate.workers.processes.wake_event import ENDING
from ablate.workers.serve import ENDED
from tests.integration.worker_service import Service, block, built_in_arm, corpus, processes_of, worker
from tests.waiting import LIMIT_S, until

_ENDLESS = StepsConfig(warmup=1, timed=1_000_000, val_rows=0)
_SOME = StepsConfig(warmup=1, timed=40, val_rows=0)


@pytest.fixture
def service() -> Iterator[Service]:
    running = Service()
    yield running
    running.close()


def _begin(service: Service, home: Path, process: subprocess.Popen[bytes], *, steps: StepsConfig) -> None:
    """Let the worker claim a block of two trials; return once the first has made a step."""
    config = built_in_arm(corpus(home / "corpus"), steps=steps)
    service.blocks += [block([config, config], attempt="asked"), block([config], attempt="second")]
    until(lambda: process.poll() is not None or service.steps_done())


def test_sigterm_finishes_the_block_and_claims_no_other(tmp_path: Path, service: Service) -> None:
    with worker(tmp_path, f"http://127.0.0.1:{service.port}") as process:
        _begin(service, tmp_path, process, steps=_SOME)
        assert service.bodies(":report") == []
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    (report,) = service.bodies(":report")
    assert [receipt["outcome"] for receipt in report["receipts"]] == ["measured", "measured"]
    assert len(service.blocks) == 1
    log = (tmp_path / "worker.log").read_text()
    assert ENDING in log
    assert log.splitlines()[-1] == ENDED
    until(lambda: not processes_of(tmp_path))


@pytest.mark.parametrize("how", ["second signal", "limit"])
def test_a_second_signal_or_the_limit_gives_the_block_back(tmp_path: Path, service: Service, how: str) -> None:
    limit = {"ABLATE_DRAIN_S": "2"} if how == "limit" else {}
    with worker(tmp_path, f"http://127.0.0.1:{service.port}", **limit) as process:
        _begin(service, tmp_path, process, steps=_ENDLESS)
        process.send_signal(signal.SIGTERM)
        if how == "second signal":
            until(lambda: ENDING in (tmp_path / "worker.log").read_text())
            process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    assert [body["failure_class"] for body in service.bodies(":report")] == ["preempted"]


def _kept(home: Path) -> list[Path]:
    return sorted((home / "spool" / "tester").glob("*"))


def test_a_finished_block_survives_the_service_and_the_worker(tmp_path: Path, service: Service) -> None:
    url = f"http://127.0.0.1:{service.port}"
    with worker(tmp_path, url) as process:
        config = built_in_arm(corpus(tmp_path / "corpus"))
        service.blocks.append(block([config], attempt="kept"))
        service.reports_refused = 10**9
        (path,) = until(lambda: [one for one in _kept(tmp_path) if one.suffix == ".json"])
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o077 == 0
        until(lambda: len(service.bodies(":report")) > 3)
        assert service.bodies(":claim")[-1]["device_state"] == "ok"
        process.kill()
        process.wait()
    until(lambda: not processes_of(tmp_path))
    tried = service.bodies(":report")
    service.reports_refused = 0
    with worker(tmp_path, url):
        until(lambda: len(service.bodies(":report")) > len(tried))
        until(lambda: not _kept(tmp_path))
    sent = service.bodies(":report")
    assert len({json.dumps(body, sort_keys=True) for body in sent}) == 1
    assert sent[-1]["receipts"][0]["outcome"] == "measured"


def test_a_damaged_file_in_the_spool_is_put_aside(tmp_path: Path, service: Service) -> None:
    folder = tmp_path / "spool" / "tester"
    folder.mkdir(parents=True)
    (folder / "att_torn.json").write_text('{"attempt_id": "att_to')
    with worker(tmp_path, f"http://127.0.0.1:{service.port}"):
        until(lambda: service.bodies(":claim"))
    (damaged,) = _kept(tmp_path)
    assert damaged.name.startswith("att_torn.json.damaged-")
    assert service.bodies(":report") == []
