"""Two workers, and two trainers, on the same cores of this machine."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ablate.experiments.outcomes import ExitCode
from ablate.workers.devices.device_lock import DeviceLock, in_use, lock_addresses
from ablate.workers.errors import DeviceBusy
from tests.architecture.pages import ROOT
from tests.integration.worker_service import Service, block, built_in_arm, corpus, processes_of, worker
from tests.programs import write_program
from tests.waiting import LIMIT_S, until

_CORES = [f"core {core}" for core in sorted(os.sched_getaffinity(0))]
ABLATE = [sys.executable, "-c", "from ablate.experiments.system.console import main; main()"]

_HOLD = """
import sys, time
from ablate.workers.devices.device_lock import DeviceLock, lock_addresses
lock = DeviceLock(lock_addresses(sys.argv[3:], holder=sys.argv[1], scope=sys.argv[2]))
lock.take(patience_s=5)
print("held", flush=True)
time.sleep(600)
"""


def _holder(scope: str, *devices: str, kind: str = "trainer", **variables: str) -> subprocess.Popen[str]:
    command, own = [sys.executable, "-c", _HOLD, kind, scope, *devices], {**os.environ, **variables}
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=own)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def _trainer(scope: str, *devices: str) -> DeviceLock:
    return DeviceLock(lock_addresses(devices, holder="trainer", scope=scope))


def test_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    scope = str(tmp_path)
    with _holder(scope, "core 0", "core 1") as holder:
        try:
            pattern = rf"core 1 of this machine is in use by process {holder.pid} \(.*python.*\); stop that process, or"
            with pytest.raises(DeviceBusy, match=pattern):
                _trainer(scope, "core 7", "core 1").take()
            os.kill(holder.pid, signal.SIGSTOP)
            with pytest.raises(DeviceBusy, match=str(holder.pid)):
                _trainer(scope, "core 0").take(patience_s=0.1)
            with _trainer(scope, "core 7"), _trainer(str(tmp_path / "other"), "core 0"):
                pass
        finally:
            holder.kill()
    with _trainer(scope, "core 0", "core 1"):
        pass


@pytest.mark.parametrize("name", ["one", "my home"])
def test_a_worker_of_the_same_state_folder_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By `ablate up`, `ask` and `ablate.compare`, which write and start nothing."""
    home = tmp_path / name
    monkeypatch.setenv("ABLATE_HOME", str(home))
    monkeypatch.delenv("ABLATE_URL", raising=False)
    scope, device = f"home {home.resolve()}", "the state folder"
    addresses = lock_addresses([device], holder="worker", scope=scope)
    program = write_program(tmp_path / "code")
    assert in_use(addresses) is None
    with _holder(scope, device, kind="worker", ABLATE_STACK_ID="another") as holder:
        try:
            words = in_use(addresses)
            assert words is not None
            assert f"the state folder of this machine is in use by process {holder.pid} (" in words
            assert f"it is the worker of the stack in {home}: ABLATE_HOME={shlex.quote(str(home))} ablate down" in words
            ask = ["ask", "--vs=--step 0.05", "--", "python", "train.py", "--step", "0.01"]
            slower = {"slower": {"args": ["--step", "0.05"]}}
            compare = f"import ablate; ablate.compare('python train.py', variants={slower})"
            for command in ([*ABLATE, "up"], [*ABLATE, *ask], [sys.executable, "-c", compare]):
                done = subprocess.run(command, cwd=program, capture_output=True, text=True, check=False)
                assert done.returncode == (1 if command[-1] == compare else ExitCode.ERROR)
                error = " ".join(done.stderr.split())
                assert f"no worker can start here: {words}. To stop nothing, wait: ablate up --no-worker takes" in error
            assert not list(program.glob("ask-*")), "nothing was checked"
            assert not (home / "stack.json").exists()
        finally:
            holder.kill()
    assert in_use(addresses) is None


@pytest.mark.parametrize("frozen", [False, True])
def test_a_check_waits_for_the_block_that_has_the_cores_and_names_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    other, scope = tmp_path / "other home", str(tmp_path)
    monkeypatch.setenv("ABLATE_DEVICE_LOCKS", scope)
    monkeypatch.setenv("ABLATE_HOME", str(tmp_path / "home"))
    program = write_program(tmp_path / "code")
    command = [*ABLATE, "check", "--", "python", "train.py", "--seed", "{seed}"]
    with _holder(scope, *_CORES, kind="block", ABLATE_HOME=str(other), ABLATE_STACK_ID="another") as holder:
        if frozen:
            os.kill(holder.pid, signal.SIGSTOP)
        with subprocess.Popen(command, cwd=program, stderr=subprocess.PIPE, text=True) as check:
            assert check.stderr is not None
            line = check.stderr.readline()
            assert line.startswith(
                f"note the check waits for its turn: {_CORES[0]} of this machine is in use by process"
            )
            assert (
                f"it is the worker of the stack in {other}: ABLATE_HOME={shlex.quote(str(other))} ablate down" in line
            )
            assert check.poll() is None
            holder.kill()
            rest = check.stderr.read()
            assert check.wait(LIMIT_S) == 0, rest
            assert "run 1 of 3" in rest


def test_a_block_waits_for_that_of_another_stack_and_says_so(tmp_path: Path) -> None:
    service, scope = Service(), f"home {tmp_path.resolve()}"
    with worker(tmp_path, f"http://127.0.0.1:{service.port}"):
        until(lambda: service.bodies(":claim"))
        with _holder(scope, *_CORES, kind="block") as holder:
            service.blocks.append(block([built_in_arm(corpus(tmp_path / "corpus"))], attempt="turn"))
            until(lambda: any(f"in use by process {holder.pid}" in str(beat) for beat in service.bodies(":heartbeat")))
            assert not list((tmp_path / "work").glob("att_turn/*/log.txt"))
            holder.kill()
        (report,) = until(lambda: service.bodies(":report"))
    assert report["receipts"][0]["outcome"] == "measured", report
    service.close()


def test_lock_is_all_or_nothing(tmp_path: Path) -> None:
    scope = str(tmp_path)
    with _trainer(scope, "core 1"):
        with pytest.raises(DeviceBusy):
            _trainer(scope, "core 0", "core 1").take()
        with _trainer(scope, "core 0"):
            pass


_RACE = """
import os, random, signal, sys, time
from ablate.workers.devices.device_lock import DeviceLock, lock_addresses
from ablate.workers.errors import DeviceBusy
chance = random.Random(int(sys.argv[2]))
while True:
    devices = chance.sample(["a", "b", "c", "d"], chance.randint(2, 4))
    held = DeviceLock(lock_addresses(devices, holder="trainer", scope=sys.argv[1]))
    try:
        held.take(patience_s=5)
    except DeviceBusy:
        continue
    print("took", *sorted(devices), flush=True)
    time.sleep(chance.random() * 0.004)
    print("left", *sorted(devices), flush=True)
    held.release()
"""


def test_racing_holders_of_several_devices_never_block_each_other_and_may_be_killed_at_any_time(tmp_path: Path) -> None:
    """Five processes take two to four of four locks in any order; one after another dies of SIGKILL. All go on."""
    command, taken = [sys.executable, "-c", _RACE, str(tmp_path)], [tmp_path / f"{seed}.txt" for seed in range(5)]
    racers = []
    for seed, path in enumerate(taken):
        with path.open("w") as output:
            racers.append(subprocess.Popen([*command, str(seed)], cwd=ROOT, stdout=output))
    try:
        _wait_for(taken, 6)
        for dead, racer in enumerate(racers[:-1]):
            racer.kill()
            racer.wait()
            _wait_for(taken[dead + 1 :], 6)
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    with _trainer(str(tmp_path), "a", "b", "c", "d"):
        pass


def _wait_for(paths: list[Path], more: int) -> None:
    """Wait until every racer has taken its devices so many times more."""
    goals = {path: _times(path) + more for path in paths}
    until(lambda: all(_times(path) >= goal for path, goal in goals.items()), what="a racer that takes its devices")


def _times(path: Path) -> int:
    return path.read_text().count("took")


def test_two_holders_never_have_one_device(tmp_path: Path) -> None:
    """One lock file each under all locks of a drawn choice: two at a time would find the other's."""
    program = """
import os, random, sys, time
from pathlib import Path
from ablate.workers.devices.device_lock import DeviceLock, lock_addresses
chance, folder = random.Random(int(sys.argv[2])), Path(sys.argv[1])
for _ in range(60):
    devices = chance.sample(["a", "b", "c"], 2)
    held = DeviceLock(lock_addresses(devices, holder="trainer", scope=str(folder)))
    held.take(patience_s=60)
    for device in devices:
        (folder / device).open("x").close()
    time.sleep(0.001)
    for device in devices:
        (folder / device).unlink()
    held.release()
"""
    racers = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(seed)], cwd=ROOT) for seed in range(4)
    ]
    assert [racer.wait(LIMIT_S) for racer in racers] == [0] * 4


def test_second_worker_of_a_state_folder_is_refused_and_one_of_another_folder_is_not(tmp_path: Path) -> None:
    service = Service()
    url, locks = f"http://127.0.0.1:{service.port}", f"set of {tmp_path}"
    with worker(tmp_path / "one", url, ABLATE_DEVICE_LOCKS=locks) as first:
        until(lambda: service.bodies(":claim"))
        for frozen in (False, True):
            if frozen:
                os.kill(first.pid, signal.SIGSTOP)
            with worker(tmp_path / "one", url, ABLATE_DEVICE_LOCKS=locks) as second:
                assert second.wait(LIMIT_S) == ExitCode.ERROR
            text = " ".join((tmp_path / "one" / "worker.log").read_text().split())
            assert f"worker cannot run: the state folder of this machine is in use by process {first.pid} (" in text
        assert first.poll() is None
        claims = len(service.bodies(":claim"))
        with worker(tmp_path / "two", url, ABLATE_DEVICE_LOCKS=locks, ABLATE_NODE_NAME="other"):
            until(lambda: len(service.bodies(":claim")) > claims)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    until(lambda: not processes_of(tmp_path / "one"))
    claims = len(service.bodies(":claim"))
    with worker(tmp_path / "one", url, ABLATE_DEVICE_LOCKS=locks):
        until(lambda: len(service.bodies(":claim")) > claims)
    service.close()


def test_trainer_waits_until_the_other_trainer_is_gone(tmp_path: Path) -> None:
    """A worker that died may leave its trainer for a moment; its successor's trial does not begin beside it."""
    service = Service()
    scope = f"home {tmp_path.resolve()}"
    with worker(tmp_path, f"http://127.0.0.1:{service.port}"):
        until(lambda: service.bodies(":claim"))
        with _holder(scope, *_CORES) as holder:
            service.blocks.append(block([built_in_arm(corpus(tmp_path / "corpus"))], attempt="waits"))
            folder = tmp_path / "work" / "att_waits" / "trl_waits_0"
            until((folder / "log.txt").exists)
            beats = len(service.bodies(":heartbeat"))
            until(lambda: len(service.bodies(":heartbeat")) > beats + 10)
            assert not (folder / "prepared.json").exists()
            holder.kill()
        (report,) = until(lambda: service.bodies(":report"))
    assert report["receipts"], report
    assert report["receipts"][0]["outcome"] == "measured"
    service.close()
