"""`ablate fleet slurm` under a real slurmctld with several slurmd on this machine; skipped where Slurm is missing."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api_stack import Api, served_api
from tests.cli import Done, ablate, speaking_to
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
    assert books.most_jobs in (2, 3)
    assert set(books.troubles) <= set(trouble.TROUBLES)
    assert sum(books.troubles.values()) >= 3, books


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
