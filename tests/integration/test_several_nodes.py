"""Trials over several nodes where one fails, with a launcher that starts the parts on this machine as srun does.

tests/integration/test_fleet_slurm.py has the real one.
"""

import fcntl
import json
import multiprocessing
import os
import shutil
import stat
import sys
import tempfile
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ablate.experiments.design.kinds.package import PackageArm
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.system.processes import adopt_orphans
from ablate.workers.commands.code_copy import copy_code
from ablate.workers.commands.several_nodes import node_names, run_on_nodes
from ablate.workers.environment_variables import allocated_nodes
from ablate.workers.errors import AllocationUnfit
from ablate.workers.trials.result import TrialOrder, TrialResult
from tests.factories import spec_values
from tests.own_packages import OwnPackages, declared, own_packages
from tests.programs import order_for, program_config, write_program

__all__ = ["own_packages"]

_SRUN = """\
#!{python}
import os, signal, subprocess, sys, threading
number = next(int(one.partition("=")[2]) for one in sys.argv if one.startswith("--ntasks="))
program = sys.argv[next(index for index, one in enumerate(sys.argv) if index and not one.startswith("--")):]
order, tasks, lock = sys.stdin.buffer.read(), [], threading.Lock()
for task in range(number):
    own = {{"SLURM_PROCID": str(task), "SLURM_NNODES": str(number), "SLURMD_NODENAME": f"n{{task}}"}}
    own |= {{"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "TMPDIR": os.path.join(os.environ["TEMPORARY"], f"n{{task}}")}}
    if task:
        own["PATH"] = os.environ.get("OTHER_PATH", os.environ["PATH"])
    tasks.append(subprocess.Popen(program, stdin=-1, stdout=-1, stderr=-1, env={{**os.environ, **own}}))
signal.signal(signal.SIGTERM, lambda *_: [one.terminate() for one in tasks])
def forward(task, source, target):
    for line in source:
        with lock:
            target.write(f"{{task}}: ".encode() + line)
            target.flush()
        if line == b"this node dies\\n":
            tasks[task].kill()
threads = []
for task, one in enumerate(tasks):
    for source, target in ((one.stdout, sys.stdout.buffer), (one.stderr, sys.stderr.buffer)):
        threads.append(threading.Thread(target=forward, args=(task, source, target)))
        threads[-1].start()
    one.stdin.write(order)
    one.stdin.close()
codes = [one.wait() for one in tasks]
[one.join() for one in threads]
sys.exit(max(map(abs, codes)))
"""
_RANK = """
import ablate, os, signal, sys, time
node = os.environ["NODE_RANK"]
os.environ["RANK"], os.environ["WORLD_SIZE"] = node, os.environ["NNODES"]
print("the line of node", node, flush=True)
{before}
with ablate.trial(seed=7) as trial:
    for step in trial.steps():
        time.sleep(0.02 if node == "0" else 0.03)
        with step.waiting():
            time.sleep(0.02 if node == "0" else 0.01)
        step.report(loss=1.0 + int(node), tokens=10)
    {inside}
{after}
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, temporary = tmp_path / "programs", tmp_path / "temporary"
    for folder in (programs, temporary / "n0", temporary / "n1"):
        folder.mkdir(parents=True)
    monkeypatch.setenv("TEMPORARY", str(temporary))
    for name, text in (("srun", _SRUN.format(python=sys.executable)), ("squeue", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(programs), os.environ["PATH"]]))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("ABLATE_NODE_CLASS", "cpu")


def result_on_two_nodes(tmp_path: Path, before: str = "", inside: str = "", after: str = "") -> tuple[TrialResult, str]:
    """Return result and log of a trial over two nodes."""
    folder = write_program(tmp_path / "code", _RANK.format(before=before, inside=inside or "pass", after=after))
    order = order_for(program_config(folder, command=("python", "train.py"), nodes=2), tmp_path / "home")
    order.paths.log.touch()
    result = _result(replace(order, dataset=copy_code(order).data_folder))
    return result, order.paths.log.read_text()


def _result(order: TrialOrder) -> TrialResult:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(order, theirs))
    child.start()
    theirs.close()
    result = TrialResult.model_validate_json(ours.recv())
    child.join()
    return result


def _run(order: TrialOrder, answer: Connection) -> None:
    adopt_orphans()
    answer.send(run_on_nodes(order).model_dump_json())


@pytest.mark.usefixtures("launcher")
def test_the_ranks_of_two_nodes_make_one_trial(tmp_path: Path) -> None:
    result, log = result_on_two_nodes(tmp_path, inside="trial.report(**{f'node_{node}': 5})")
    assert result.failure_class is None, result.message
    assert result.program is not None
    assert (result.program.ranks, result.program.rank_nodes) == (2, ("n0", "n1"))
    assert result.program.reported == {"node_0": 5.0, "node_1": 5.0}
    assert {(step.tokens, step.loss) for step in result.program_steps} == {(20, 1.5)}
    assert result.program.rank_step_s is not None
    own, slower = result.program.rank_step_s
    assert 0.02 <= own < slower, "without the time that a rank waits"
    assert sorted(line for line in log.splitlines() if "the line" in line) == [
        "0: the line of node 0", "1: the line of node 1",
    ]  # fmt: skip
    assert [node.name for node in result.nodes] == ["n0", "n1"]
    assert result.cpu_s is not None
    assert result.cpu_s > 0
    assert not list((tmp_path / "temporary").glob("*/*")), "parts remove their files"


_TRAINING = """
import os
def train(trial, config):
    os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["NODE_RANK"], os.environ["NNODES"]
    for step in trial.steps():
        step.report(loss=1.0, tokens=config["width"])
    trial.attest(kind=config["kind"], fast=config["fast"] or os.environ["NODE_RANK"] == {odd!r})
"""


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize(("odd", "fast"), [("none", False), ("1", "mixed")])
def test_the_recipe_of_a_package_runs_over_two_nodes_and_attests_on_both(
    tmp_path: Path, own_packages: OwnPackages, odd: str, fast: bool | str
) -> None:
    folder = own_packages.add("mine", declared("mine"), _TRAINING.format(odd=odd))
    values = spec_values(
        workload={"recipe": "mine", "steps": {"warmup": 1, "timed": 3}},
        baseline={},
        variants={"b": {"gates": {"kind": "b"}}},
        placement={"node_class": "cpu", "nodes": 2},
    )
    arm = make_plan(parse_spec(json.dumps(values).encode(), "application/json")).arms[1].config.with_seed(5)
    assert isinstance(arm, PackageArm)
    assert arm.lane().endswith("*2")
    order = order_for(replace(arm, env={"PYTHONPATH": str(folder.parent)}), tmp_path / "home")
    order.paths.log.touch()
    result = _result(order)
    assert result.failure_class is None, order.paths.log.read_text()
    assert result.program is not None
    assert (result.program.ranks, result.program.code) == (2, arm.package.digest)
    assert result.facts == {"kind": "b", "fast": fast}


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize(
    ("place", "act", "words"),
    [
        ("before", "sys.exit(3)", "the program on node n1 ended with exit code 3"),
        ("inside", "raise KeyError('lost')", "rank 1 of 2 raised builtins.KeyError: 'lost'"),
        ("before", "os.environ['RANK'] = '0'", "two processes report as rank 0"),
    ],
    ids=["exits", "raises", "same rank"],
)
def test_a_failure_on_one_node_is_that_of_the_trial_and_names_the_place(
    tmp_path: Path, place: str, act: str, words: str
) -> None:
    result, log = result_on_two_nodes(tmp_path, **{place: f"if node == '1': {act}"})
    assert result.failure_class is FailureClass.USER_ERROR, log
    assert words in str(result.message)


@pytest.mark.usefixtures("launcher")
def test_a_part_that_dies_is_a_failure_of_the_machine_and_the_next_one_removes_its_files(tmp_path: Path) -> None:
    dies = "if node == '1': print('this node dies', flush=True); time.sleep(60)"
    result, log = result_on_two_nodes(tmp_path, before=dies)
    assert result.failure_class is FailureClass.INFRA_NODE, log
    assert "before all 2 nodes had ended their parts (ended: " in str(result.message)
    (left,) = (tmp_path / "temporary" / "n1").iterdir()
    running = tempfile.mkdtemp(dir=left.parent, prefix="ablate-part-")
    descriptor = os.open(running, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    result_on_two_nodes(tmp_path / "next")
    os.close(descriptor)
    assert [str(folder) for folder in left.parent.iterdir()] == [running], "not that of a running part"


@pytest.mark.usefixtures("launcher")
def test_the_other_nodes_have_a_few_seconds_to_end_after_a_failure(tmp_path: Path) -> None:
    """Otherwise this test would not end before its limit."""
    result, _log = result_on_two_nodes(tmp_path, before="if node == '1': sys.exit(3)", after="time.sleep(1000)")
    assert "the program on node n1 ended with exit code 3" in str(result.message)


@pytest.mark.usefixtures("launcher")
def test_only_nodes_that_are_alike_make_an_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert allocated_nodes() == 2
    assert node_names(tmp_path / "data") == ("n0", "n1")
    assert not list((tmp_path / "data").iterdir())
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "env").symlink_to(shutil.which("env") or "")  # the isolation's check needs it; compilers are missing
    monkeypatch.setenv("OTHER_PATH", str(bare))
    with pytest.raises(AllocationUnfit, match=r"differ: .* is [\d.]+ on n0, and unknown on n1; ask for equal nodes"):
        node_names(tmp_path / "data")


@pytest.mark.usefixtures("launcher")
def test_a_launcher_that_cannot_start_is_repeated(tmp_path: Path) -> None:
    broken = tmp_path / "programs" / "srun"
    broken.write_text("#!/bin/sh\necho 'srun: error: no such partition' >&2\nexit 1\n")
    assert broken.stat().st_mode & stat.S_IXUSR
    with pytest.raises(AllocationUnfit, match=r"started 0 of 2 nodes and .* code 1: srun: error: no such part"):
        node_names(tmp_path / "data")


def test_a_worker_inside_a_step_has_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    assert allocated_nodes() == 4
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert allocated_nodes() == 1
