"""Job scripts for Slurm, run by bash with a program of the test as worker, and the number of jobs; without Slurm."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.service.cli import slurm
from ablate.service.errors import FleetError
from ablate.service.schemas.nodes import WaitingPublic
from tests.waiting import LIMIT_S, until

WORKER = f"""\
#!{sys.executable} -IS
import os, signal, sys
seen = os.environ["SEEN"]
def write(name, text):
    with open(os.path.join(seen, name), "a") as file:
        file.write(text + "\\n")
def told(number, _frame):
    write("signals", signal.Signals(number).name)
    if number == signal.SIGINT or not os.environ["STAY"]:
        os._exit(0)
for number in (signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, told)
write("env", "\\n".join(f"{{name}}={{value}}" for name, value in os.environ.items()))
write("arguments", " ".join(sys.argv[1:]))
write("ready", "")
if os.environ["END"]:
    sys.exit(int(os.environ["END"]))
while True:
    signal.pause()
"""


def fleet(folder: Path, **changes: Any) -> slurm.SlurmFleet:
    values: dict[str, Any] = {
        "name": "ablate-h200-1",
        "node_class": "h200",
        "devices": 1,
        "nodes": 1,
        "url": "https://ablate.example.org",
        "token_file": folder / "to ken",
        "program": str(folder / "work er"),
        "time_s": 28_800,
        "signal_s": 600,
        "idle_s": 300,
        "options": ("--partition=gpu",),
        "settings": (),
        "setup": (),
    }
    return slurm.SlurmFleet(**{**values, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "to ken").write_text("ablate_to-enrol\n")
    (tmp_path / "work er").write_text(WORKER)
    (tmp_path / "work er").chmod(0o755)
    (tmp_path / "seen").mkdir()
    (tmp_path / "tmp").mkdir()
    return tmp_path


def start(folder: Path, script: str, **variables: str) -> "subprocess.Popen[bytes]":
    (folder / "job.sh").write_text(script)
    own = {"SEEN": str(folder / "seen"), "TMPDIR": str(folder / "tmp"), "ABLATE_TOKEN": "of-the-operator", **variables}
    return subprocess.Popen(["bash", str(folder / "job.sh")], env={**os.environ, "STAY": "", "END": "", **own})


def seen(folder: Path, name: str) -> str:
    return (folder / "seen" / name).read_text()


def test_the_worker_gets_its_settings_a_home_of_its_own_and_nothing_of_the_operator(folder: Path) -> None:
    own = fleet(folder, settings=("ABLATE_DATA_DIR=/shared/a b", "X=it's $HOME"), setup=("export Y=1", "cd /"))
    assert start(folder, own.script(), END="3").wait(LIMIT_S) == 3, "the job ends as its worker"
    env = dict(line.partition("=")[::2] for line in seen(folder, "env").splitlines())
    assert {name: env[name] for name in ("ABLATE_DATA_DIR", "X", "Y", "PWD")} == {
        "ABLATE_DATA_DIR": "/shared/a b", "X": "it's $HOME", "Y": "1", "PWD": "/",
    }  # fmt: skip
    assert env["ABLATE_ENROLMENT_TOKEN"] == "ablate_to-enrol"
    assert (env["ABLATE_NODE_CLASS"], env["ABLATE_URL"]) == ("h200", "https://ablate.example.org")
    assert "ABLATE_TOKEN" not in env
    assert env["ABLATE_HOME"].startswith(str(folder / "tmp"))
    assert list((folder / "tmp").iterdir()) == [], "its home is gone"
    assert seen(folder, "arguments").startswith("worker up --exit-when-idle 300s --until 20")


@pytest.mark.parametrize("stay", ["", "1"], ids=["ends", "finishes its block"])
def test_the_early_signal_lets_the_block_end_and_the_end_of_the_job_takes_it_back(folder: Path, stay: str) -> None:
    job = start(folder, fleet(folder).script(), STAY=stay)
    until((folder / "seen" / "ready").exists)
    job.send_signal(signal.SIGUSR1)
    until((folder / "seen" / "signals").exists)
    if stay:
        job.send_signal(signal.SIGTERM)
    assert job.wait(LIMIT_S) == 0
    assert seen(folder, "signals").split() == (["SIGUSR1", "SIGINT"] if stay else ["SIGUSR1"])
    assert list((folder / "tmp").iterdir()) == []


def test_a_job_without_its_token_file_fails_at_once(folder: Path) -> None:
    (folder / "to ken").unlink()
    assert start(folder, fleet(folder).script()).wait(LIMIT_S) == 1
    assert not (folder / "seen" / "ready").exists()


@given(time_s=st.integers(60, 10**6), share=st.floats(0, 0.999))
def test_the_worker_ends_before_its_job_and_drains_before_it_ends(time_s: int, share: float) -> None:
    signal_s = max(1, int(time_s * share))
    text = fleet(Path("/f"), time_s=time_s, signal_s=signal_s).script()
    hours, minutes, _ = map(int, text.partition("--time=")[2].partition("\n")[0].split(":"))
    until_s = int(text.partition("-d '+")[2].partition(" ")[0])
    drain_s = int(text.partition("ABLATE_DRAIN_S=")[2].partition("\n")[0])
    job_s = (hours * 60 + minutes) * 60
    assert time_s <= job_s < time_s + 60
    assert job_s - signal_s + drain_s <= job_s, "a block that may finish does so before Slurm kills it"
    assert 0 <= drain_s <= signal_s
    assert time_s - 60 <= until_s <= time_s


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"options": ("--comment=a b",)}, "is no option of sbatch"),
        ({"options": ("gpu",)}, "is no option of sbatch"),
        ({"options": ("--qos=a\n#SBATCH --x",)}, "is no option of sbatch"),
        ({"settings": ("1X=2",)}, "allowed: NAME=value"),
        ({"settings": ("X",)}, "allowed: NAME=value"),
        ({"nodes": 2}, "share the prepared code: name a folder that they all see, --caches DIR"),
        ({"time_s": 59, "signal_s": 1}, "allowed: --time of a minute or more"),
        ({"time_s": 600, "signal_s": 600}, "allowed: --time of a minute or more"),
    ],
    ids=["space", "word", "line", "name", "value", "no folder", "short", "signal"],
)
def test_what_a_script_cannot_hold_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FleetError, match=words):
        fleet(Path("/f"), **changes)


ROWS = st.lists(
    st.builds(
        WaitingPublic,
        node_class=st.sampled_from(["h200", "cpu"]),
        devices=st.sampled_from([1, 2, 8]),
        nodes_each=st.sampled_from([1, 2]),
        blocks=st.integers(1, 200),
        device_minutes=st.floats(0.01, 1e5),
        least_s=st.just(60.0),
        nodes=st.integers(0, 9),
    ),
    unique_by=lambda row: (row.node_class, row.devices, row.nodes_each),
    max_size=6,
)


@given(
    waiting=ROWS,
    devices=st.sampled_from([1, 2, 8]),
    nodes=st.sampled_from([1, 2]),
    work_s=st.integers(1, 10**5),
    most=st.integers(1, 50),
)
def test_as_many_jobs_as_the_work_needs_and_never_more_than_blocks(
    waiting: list[WaitingPublic], devices: int, nodes: int, work_s: int, most: int
) -> None:
    number = fleet(Path("/f"), devices=devices, nodes=nodes, settings=("ABLATE_DATA_DIR=/d",)).wanted(
        waiting, work_s=work_s, most=most
    )
    mine = [row for row in waiting if (row.node_class, row.devices, row.nodes_each) == ("h200", devices, nodes)]
    if not mine:
        assert number == 0
        return
    (row,) = mine
    assert 1 <= number <= min(most, row.blocks)
    job_seconds = row.device_minutes * 60 / (devices * nodes)
    assert number == min(most, row.blocks) or number * work_s >= job_seconds * (1 - 1e-9)
    assert number == 1 or (number - 1) * work_s < job_seconds
    assert not math.isnan(job_seconds)


def test_jobs_that_are_too_short_for_every_block_are_not_started() -> None:
    row = WaitingPublic(node_class="h200", devices=1, blocks=3, device_minutes=300, least_s=6000.0, nodes=0)
    with pytest.raises(FleetError, match="raise --time, or lower limits"):
        fleet(Path("/f"), time_s=3600).wanted([row], work_s=60, most=8)
    assert fleet(Path("/f"), time_s=7200).wanted([row], work_s=60, most=8) == 3


def test_without_slurm_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        FleetError, match="squeue is not installed here; run this where people submit jobs, or use --print"
    ):
        slurm.adjust(fleet(tmp_path), 1, array=False)
