"""Workers that end by themselves, and those that a cluster ends: a real service and real worker processes."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from ablate.experiments.outcomes import ExitCode
from ablate.model.config import StepsConfig
from ablate.service.store.tables import attempts
from ablate.workers.processes.wake_event import ENDING
from tests.api_stack import WORKER, Api, served_api
from tests.integration.worker_service import Service, block, built_in_arm, corpus, processes_of, worker
from tests.waiting import LIMIT_S, until

_ENDLESS = StepsConfig(warmup=1, timed=1_000_000, val_rows=0)
_SOME = StepsConfig(warmup=1, timed=40, val_rows=0)
_OVERRIDES = {"d_model": 32, "headdim": 16, "d_state": 16, "seq_len": 64, "vocab_size": 512, "threads": 1}
UP = [str(Path(sys.executable).with_name("ablate")), "worker", "up"]


@pytest.fixture
def service() -> Iterator[Service]:
    running = Service()
    yield running
    running.close()


def _submit(api: Api, folder: Path) -> dict[str, Any]:
    return api.submit(
        workload__overrides={**_OVERRIDES, "corpus": str(corpus(folder))},
        workload__steps={"warmup": 1, "warmup_s": 0, "timed": 10, "val_rows": 2},
        variants={"psiv-on": {"gates": {"psiv_cache": True}}},
        design={"seeds": [1], "blocks": {"count": 3}, "order_seed": 7},
        verdict__primary={"metric": "peak_allocated_gib", "margin": "1%"},
    )


def _states(api: Api, made: dict[str, Any]) -> list[str]:
    return [item["state"] for item in api.get(f"{made['links']['self']}/blocks").json()["items"]]


def _run_to_its_end(api: Api, home: Path, *options: str) -> str:
    """Run `ablate worker up` with options until it ends by itself with exit code 0; return its last words."""
    url, log = str(api.client.base_url).rstrip("/"), home.with_suffix(".log")
    earlier = len(log.read_text()) if log.exists() else 0
    with worker(home, url, command=[*UP, *options], ABLATE_WORKER_TOKEN=WORKER) as process:
        assert process.wait(LIMIT_S) == 0, log.read_text()
    until(lambda: not processes_of(home))
    return " ".join(log.read_text()[earlier:].split())


def test_a_worker_leaves_what_does_not_fit_and_ends_idle_and_a_patient_one_takes_it(tmp_path: Path) -> None:
    with served_api("sqlite", tmp_path) as api:
        made = _submit(api, tmp_path / "corpus")
        text = _run_to_its_end(api, tmp_path / "node", "--until", "1h", "--exit-when-idle", "1s")
        assert "this worker ends: there was no work for 1 s" in text
        assert _states(api, made) == ["queued"] * 3, "the limit of a first block is longer than an hour"
        text = _run_to_its_end(api, tmp_path / "node", "--max-blocks", "1")
        assert "this worker ends: it has reported 1 block" in text
        assert _states(api, made) == ["done", "queued", "queued"]
        text = _run_to_its_end(api, tmp_path / "node", "--until", "1h", "--max-blocks", "2")
        assert "this worker ends: it has reported 2 blocks" in text
        assert _states(api, made) == ["done"] * 3, "now the time of a block is known"


def test_an_early_signal_lets_the_block_finish_and_the_next_worker_repeats_nothing(tmp_path: Path) -> None:
    with served_api("sqlite", tmp_path) as api:
        made, url = _submit(api, tmp_path / "corpus"), str(api.client.base_url).rstrip("/")
        with worker(tmp_path / "one", url, ABLATE_WORKER_TOKEN=WORKER) as process:
            until(lambda: "running" in _states(api, made))
            process.send_signal(signal.SIGUSR1)
            assert process.wait(LIMIT_S) == 0
        assert _states(api, made) == ["done", "queued", "queued"]
        _run_to_its_end(api, tmp_path / "one", "--max-blocks", "2")
        with api.store.read() as connection:
            ended = connection.execute(select(attempts.c.state)).scalars().all()
        assert ended == ["done"] * 3, "no attempt was in vain"


def test_a_block_that_would_take_longer_than_the_drain_time_is_given_back_at_once(
    tmp_path: Path, service: Service
) -> None:
    with worker(tmp_path, f"http://127.0.0.1:{service.port}", ABLATE_DRAIN_S="600") as process:
        config = built_in_arm(corpus(tmp_path / "corpus"), steps=_ENDLESS)
        service.blocks.append(block([config], attempt="long").model_copy(update={"expected_s": 80_000.0}))
        until(service.steps_done)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(LIMIT_S) == 0
    assert [body["failure_class"] for body in service.bodies(":report")] == ["preempted"]
    assert ENDING not in (tmp_path / "worker.log").read_text(), "it does not say that a block may finish"


@pytest.mark.parametrize("is_first", [True, False], ids=["worker first", "worker last"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda one: one.name)
def test_a_signal_to_every_process_of_the_job_preempts_the_block_and_blames_nobody(
    tmp_path: Path, service: Service, number: signal.Signals, is_first: bool
) -> None:
    with worker(tmp_path, f"http://127.0.0.1:{service.port}") as process:
        service.blocks.append(block([built_in_arm(corpus(tmp_path / "corpus"), steps=_ENDLESS)], attempt="all"))
        until(service.steps_done)
        others = processes_of(tmp_path).keys() - {process.pid}
        for pid in (process.pid, *others) if is_first else (*others, process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            time.sleep(0 if is_first else 0.02)  # Slurm sends them one after another
        assert process.wait(LIMIT_S) == 0
    assert [body["failure_class"] for body in service.bodies(":report")] == ["preempted"]
    until(lambda: not processes_of(tmp_path))


def test_the_end_of_its_time_gives_a_running_block_back(tmp_path: Path, service: Service) -> None:
    with worker(tmp_path, f"http://127.0.0.1:{service.port}", ABLATE_UNTIL="20s") as process:
        service.blocks.append(block([built_in_arm(corpus(tmp_path / "corpus"), steps=_ENDLESS)], attempt="late"))
        assert process.wait(LIMIT_S) == 0
    given_back = [body["failure_class"] for body in service.bodies(":report")]
    assert given_back == ([] if service.blocks else ["preempted"]), "a slow machine may never have claimed it"
    left = [body["left_s"] for body in service.bodies(":claim")]
    assert left == sorted(left, reverse=True)
    assert all(0 < one <= 20 for one in left)
    assert "this worker ends: its time is over" in (tmp_path / "worker.log").read_text()


def test_the_last_block_is_not_lost_while_the_service_is_away(tmp_path: Path, service: Service) -> None:
    with worker(tmp_path, f"http://127.0.0.1:{service.port}", ABLATE_MAX_BLOCKS="1") as process:
        config = built_in_arm(corpus(tmp_path / "corpus"), steps=_SOME)
        service.reports_refused = 12
        service.blocks += [block([config], attempt="last"), block([config], attempt="not claimed")]
        assert process.wait(LIMIT_S) == 0
    assert len(service.bodies(":report")) == 13, "it was sent until the service took it"
    assert len(service.blocks) == 1
    assert not list((tmp_path / "spool").rglob("*.json"))


def test_a_worker_without_a_service_ends_idle_and_one_whose_time_has_passed_at_once(tmp_path: Path) -> None:
    with worker(tmp_path / "idle", "http://127.0.0.1:9", ABLATE_EXIT_WHEN_IDLE="1s") as process:
        assert process.wait(LIMIT_S) == 0
    assert "this worker ends: there was no work for 1 s" in (tmp_path / "idle" / "worker.log").read_text()
    with worker(tmp_path / "late", "http://127.0.0.1:9", ABLATE_UNTIL="2026-01-01T00:00Z") as process:
        assert process.wait(LIMIT_S) == 0
    assert "this worker ends: its time is over" in (tmp_path / "late" / "worker.log").read_text()


@pytest.mark.parametrize("value", ["teatime", ""])
def test_a_wrong_option_is_refused_with_what_is_allowed(tmp_path: Path, value: str) -> None:
    """A variable of a job script may be empty."""
    with worker(tmp_path / "w", "http://127.0.0.1:9", command=[*UP, "--until", value]) as process:
        assert process.wait(LIMIT_S) == ExitCode.ERROR
    text = " ".join((tmp_path / "w.log").read_text().split())
    assert f"ABLATE_UNTIL: is '{value}'; allowed: a time such as 2026-11-29T20:00" in text
