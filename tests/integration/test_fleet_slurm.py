"""`ablate fleet slurm` under a real slurmctld with several slurmd on this machine; skipped where Slurm is missing."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import select

from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.lifecycle import OutboxKind
from ablate.service.store.tables import receipts
from tests.api_stack import Api, served_api
from tests.cli import Done, ablate, speaking_to
from tests.factories import command_values
from tests.fleet import cluster as slurm
from tests.fleet import trouble
from tests.fleet.cluster import Cluster
from tests.waiting import until

needs_slurm = pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing()))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="fleet-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def api(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    with served_api("sqlite", folder / "service") as running, speaking_to(running, monkeypatch):
        yield running


@pytest.fixture
def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with slurm.running(folder, nodes=2) as running:
        monkeypatch.setenv("SLURM_CONF", running.environment["SLURM_CONF"])
        monkeypatch.chdir(folder)
        (folder / "token").write_text("ablate_to-enrol")
        yield running


@pytest.fixture
def enrolled(api: Api, cluster: Cluster, folder: Path) -> Api:
    """The service, with a real enrolment token for the cluster's workers."""
    made = api.client.post("/v1/enrolments", headers=api.admin, json={"node_class": "cpu", "uses": 10})
    (folder / "token").write_text(made.json()["secret"])
    return api


def look(folder: Path, *options: Any) -> Done:
    """Adjust the jobs once; return what was said on one line each."""
    done = ablate("fleet", "slurm", "cpu", "--token-file", folder / "token", "--once", "--time", "4h", *options)
    return Done(done.code, " ".join(done.out.split()), " ".join(done.err.split()))


@needs_slurm
def test_the_jobs_follow_the_work_up_to_a_maximum_and_surplus_ones_that_wait_are_cancelled(
    api: Api, cluster: Cluster, folder: Path
) -> None:
    assert look(folder).out == "0 wanted, 0 there (0 of them wait)"
    made = api.submit(limits={"device_minutes": 100_000})
    first = look(folder, "--max", 3, "--array", "--sbatch=--hold")
    assert first.out.startswith("3 wanted, 0 there (0 of them wait); submitted "), first
    assert len(cluster.jobs("PENDING")) == 3
    assert len(cluster.run("squeue", "--noheader", "--format=%A").split()) == 1, "one array"
    assert look(folder, "--max", 3).out == "3 wanted, 3 there (3 of them wait)", "no job twice"
    more = look(folder, "--max", 5, "--sbatch=--hold")
    assert more.out.startswith("5 wanted, 3 there (3 of them wait); submitted "), more
    assert look(folder, "--max", 5, "--name", "another").out.startswith("5 wanted, 0 there"), "fleets go by name"
    api.cancel(made["id"])
    assert look(folder, "--max", 5).out.startswith("0 wanted, 5 there (5 of them wait); cancelled ")
    assert look(folder, "--name", "another").out.startswith("0 wanted, 5 there"), "whatever state they are in"
    until(lambda: not cluster.jobs(), what="the end of the jobs")


@needs_slurm
def test_a_refusal_of_slurm_is_repeated_and_jobs_that_fail_are_not_submitted_for_ever(
    api: Api, cluster: Cluster, folder: Path
) -> None:
    api.submit(limits={"device_minutes": 100_000})
    refused = look(folder, "--partition", "nope")
    assert refused.code != 0
    assert "sbatch --parsable refused (1): sbatch: error: invalid partition specified: nope" in refused.err
    for _ in range(3):
        assert "submitted" in look(folder, "--max", 1, "--program", "/bin/false").out
        until(lambda: not cluster.jobs(), what="the end of a job")
    stopped = look(folder, "--max", 1, "--program", "/bin/false")
    assert stopped.code != 0
    assert "3 jobs of ablate-cpu-1 failed within the last minutes, so no other is submitted" in stopped.err
    short = look(folder, "--max", 1, "--time", "20m")
    assert "raise --time, or lower limits.trial of its spec" in short.err
    (folder / "token").unlink()
    assert "ablate nodes enrol CLASS --uses 100" in look(folder).err


@needs_slurm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_ablation_ends_whole_whatever_happens_to_its_jobs_and_no_job_is_left(folder: Path) -> None:
    books = trouble.run(folder, num_nodes=3, num_blocks=8, troubles=6, every_s=5.0, trial_s=5.0, seed=2)
    assert books.wrong() == [], books
    assert books.most_jobs in (2, 3, 4), "one that is requeued may come beside the one that has replaced it"
    assert set(books.troubles) <= set(trouble.TROUBLES)
    assert sum(books.troubles.values()) >= 3, books


_RANK = """
import argparse, os, socket, time
import ablate, torch, torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--step", type=float, default=0.04)
parser.add_argument("--closed")
options = parser.parse_args()

def reaches(act):
    try:
        act()
    except OSError:
        return 0
    return 1

with ablate.trial(seed=options.seed) as trial:
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}", flush=True)
    own_s = options.step * (1.25 if os.environ["NODE_RANK"] == "1" else 1.0)
    for step in trial.steps():
        time.sleep(own_s)
        total = torch.ones(1)
        with step.waiting():
            dist.all_reduce(total)
        step.report(loss=1 / (options.seed + step.index), tokens=100 * int(total))
    munge = socket.socket(socket.AF_UNIX)
    trial.report(
        reads_keys=reaches(lambda: os.listdir(options.closed)),
        reaches_slurm=reaches(lambda: munge.connect(f"{options.closed}/munge.sock")),
    )
    dist.destroy_process_group()
"""
"""A program whose ranks wait for each other in every step; node 1 takes a quarter longer for its own work."""


def over_two_nodes(folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "lab").mkdir()
    (folder / "lab" / "train.py").write_text(_RANK)
    command = ["torchrun", "--nproc-per-node=1", "train.py", "--seed", "{seed}", "--closed", str(folder)]
    workload = {"command": command, "code": str(folder / "lab"), "steps": {"warmup": 1, "timed": 8}}
    base: dict[str, Any] = {
        "workload": {**workload, "env": {"GLOO_SOCKET_IFNAME": "lo"}},
        "variants": {"half-speed": {"args": ["--step=0.08"]}},
        "placement": {"node_class": "cpu", "nodes": 2, "max_foreign_load": "99.99%"},
        "design": {"seeds": [1, 2, 3, 4, 5, 6], "blocks": {"count": 6}, "order_seed": 7},
        "verdict__primary": {"metric": "tokens_per_s", "margin": "5%"},
        "limits": {"device_minutes": 100_000, "trial": "5m"},
    }
    return command_values(**{**base, **changes})


def worker_over_two_nodes(folder: Path) -> None:
    """Start a worker by one job with two nodes."""
    (folder / "shared").mkdir()
    done = look(
        folder, "--nodes", 2, "--max", 1, "--caches", folder / "shared", "--logs", folder, "--set", "ABLATE_POLL_S=0.5",
        "--set", "ABLATE_ACCEPT_CODE=true", "--set", f"ABLATE_CODE_DIRS={folder}", "--set", "ABLATE_QUIET_S=0",
        "--set", "ABLATE_DEVICE_LOCKS=home", "--idle", "30s",
    )  # fmt: skip
    assert "submitted" in done.out, done


@needs_slurm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_torchrun_over_two_nodes_comes_to_a_verdict_that_names_the_slow_node(
    enrolled: Api, cluster: Cluster, folder: Path
) -> None:
    answer = enrolled.post_spec(over_two_nodes(folder))
    assert answer.status_code == 202, answer.text
    waits = enrolled.get("/v1/waiting").json()["items"]
    assert [(row["devices"], row["nodes_each"], row["blocks"]) for row in waits] == [(1, 2, 6)]
    assert "0 wanted" in look(folder).out, "no job of one node is submitted for blocks over two"
    worker_over_two_nodes(folder)
    link = answer.json()["links"]["self"]

    def is_done(number: int) -> bool:
        return bool(enrolled.get(link).json()["blocks"]["done"] >= number)

    for number in range(1, 7):
        until(partial(is_done, number), what=f"block {number}", pause_s=1.0)
    OutboxHandlers(enrolled.store).run_due(OutboxKind.JUDGE)
    verdict = enrolled.get(f"{link}/verdict").json()
    variant = next(one for one in verdict["variants"] if one["arm"] == "half-speed")
    assert variant["measured"] == "worse", variant
    assert "node n1 was 25% slower than the others' median, by more than 5% in 12 of 12 trials" in str(variant)
    assert "node n0 was" not in str(verdict)
    with enrolled.store.read() as connection:
        stored = [json.loads(text) for text in connection.execute(select(receipts.c.payload)).scalars()]
    assert len(stored) == answer.json()["plan"]["trials"]
    for one in stored:
        assert one["program"]["rank_nodes"] == ["n0", "n1"]
        assert one["program"]["reported"] == {"reads_keys": 0.0, "reaches_slurm": 0.0}
        assert [node["name"] for node in one["environment"]["nodes"]] == ["n0", "n1"]


@needs_slurm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cancelled_trial_over_two_nodes_leaves_no_process_on_either(
    enrolled: Api, cluster: Cluster, folder: Path
) -> None:
    made = enrolled.post_spec(over_two_nodes(folder, baseline={"args": ["--step=60"]})).json()
    worker_over_two_nodes(folder)

    def ranks() -> list[int]:
        lines = {one.pid: " ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])}
        return [pid for pid, line in lines.items() if str(folder) in line and "train.py" in line]

    until(lambda: len(ranks()) >= 4, what="torchrun and a rank on both nodes")
    enrolled.cancel(made["id"])
    until(lambda: not ranks(), what="the end of all ranks")
    assert cluster.jobs("RUNNING"), "the worker lives on"


def test_the_script_is_printed_without_slurm_or_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ABLATE_URL", "https://ablate.example.org")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "token").write_text("ablate_to-enrol")
    done = ablate(
        "fleet", "slurm", "h200", "--token-file", tmp_path / "token", "--print", "--gres", "gpu:1", "--account", "lab",
        "--exclusive", "--no-requeue", "--caches", "/shared/caches", "--logs", "/shared/logs", "--time", "90m",
    )  # fmt: skip
    assert done.code == 0, done.err
    for line in (
        "#SBATCH --gres=gpu:1", "#SBATCH --account=lab", "#SBATCH --exclusive", "#SBATCH --no-requeue",
        "#SBATCH --output=/shared/logs/%x-%j.log", "#SBATCH --time=01:30:00", "#SBATCH --signal=B:USR1@600",
        "export ABLATE_DATA_DIR=/shared/caches", "export ABLATE_URL=https://ablate.example.org",
    ):  # fmt: skip
        assert f"\n{line}\n" in done.out, line
    assert "to-enrol" not in done.out
