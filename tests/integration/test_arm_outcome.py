"""A variant that dies in every trial: real service, real worker, real training; the other variants get their answer."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.design.metrics import METRICS
from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.lifecycle import OVER, OutboxKind
from ablate.service.store.ablations.results import ablation_view
from tests.api_stack import WORKER, Api, served_api
from tests.integration.worker_service import corpus, processes_of, worker
from tests.waiting import until

_OVERRIDES = {"d_model": 32, "headdim": 16, "d_state": 16, "seq_len": 64, "vocab_size": 512, "threads": 1}


class Killer:
    """Ends the trainer of every trial of one arm by SIGSEGV, once it trains."""

    def __init__(self, api: Api, home: Path, worker_pid: int, *, ablation: str, arm: str) -> None:
        items = api.get(f"/v1/ablations/{ablation}/trials?limit=100").json()["items"]
        self._trials = [item["id"] for item in items if item["arm"] == arm]
        self._home, self._worker_pid = home, worker_pid
        self.killed: set[Path] = set()

    def run(self, over: threading.Event) -> None:
        while not over.wait(0.02):
            for folder in (path for trial in self._trials for path in self._home.glob(f"work/*/{trial}")):
                trains = (folder / "steps.jsonl").is_file() and not (folder / "result.json").is_file()
                if trains and folder not in self.killed:
                    for pid in self._trainers():
                        os.kill(pid, signal.SIGSEGV)
                        self.killed.add(folder)

    def _trainers(self) -> list[int]:
        pids = {pid for pid, command in processes_of(self._home).items() if "guardian" not in command}
        return [pid for pid in pids - {self._worker_pid} if _leads_a_group(pid)]


def _leads_a_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False


@contextmanager
def running(killer: Killer) -> Iterator[None]:
    over = threading.Event()
    thread = threading.Thread(target=killer.run, args=(over,))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def ended(api: Api, link: str) -> dict[str, Any]:
    """Return the ablation once it is over."""
    until(lambda: api.get(link).json()["state"] in OVER, pause_s=0.5)
    return dict(api.get(link).json())


@pytest.mark.timeout(900)  # ten trials one after another; on a busy machine each takes half a minute
def test_a_variant_that_dies_every_time_has_its_verdict_and_the_others_theirs(tmp_path: Path) -> None:
    home = tmp_path / "node"
    with served_api("sqlite", tmp_path) as api:
        made = api.submit(
            workload__overrides={**_OVERRIDES, "corpus": str(corpus(tmp_path / "corpus"))},
            workload__steps={"warmup": 1, "warmup_s": 0, "timed": 20, "val_rows": 2},
            design={"seeds": [1], "blocks": {"count": 2}, "order_seed": 7},
            verdict__primary={"metric": "peak_allocated_gib", "margin": "1%"},
        )
        url = str(api.client.base_url).rstrip("/")
        with worker(home, url, ABLATE_WORKER_TOKEN=WORKER) as process:
            killer = Killer(api, home, process.pid, ablation=made["id"], arm="psiv-on")
            with running(killer):
                shown = ended(api, made["links"]["self"])
        assert (shown["state"], shown["blocks"]["done"]) == ("completed", 2)
        assert len(killer.killed) == 4
        assert OutboxHandlers(api.store).run_due(OutboxKind.JUDGE)
        with api.store.read() as connection:
            view = ablation_view(connection, made["id"])
    assert view.verdict is not None
    dead, other = view.verdict.variants
    assert (dead.arm, dead.verdict, dead.decision) == ("psiv-on", "failed", "reject")
    assert "2 of 2 trials failed: the trial died of SIGSEGV" in dead.reason
    assert other.exact is not None
    assert other.exact.metric in METRICS
    attempts = view.verdict.circumstances.attempts
    assert [(one.block_index, one.number, one.failure_class, one.arm) for one in attempts] == [
        (0, 1, "no_receipt", "psiv-on"),
        (0, 2, "no_receipt", "psiv-on"),
    ]
    assert [trial.receipt.outcome for trial in view.trials if trial.receipt and trial.arm != "psiv-on"] == [
        "measured"
    ] * 4
