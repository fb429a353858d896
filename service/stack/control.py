"""Start, stop and inspect the embedded stack of a home, from outside its supervisor."""

import json
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from ablate.experiments.system.processes import (
    OWN_PYTHON,
    command_of,
    number_space,
    process_numbers,
    send,
    start_of,
    variable_of,
    wait_until,
)
from ablate.service.errors import StackBusy, StackError
from ablate.service.settings import SMTP_URL, WEBHOOK_KEY, child_environment
from ablate.service.stack import part_processes
from ablate.service.stack.layout import Report, StackFiles
from ablate.service.stack.parts import NO_WORKER, WORKER, check_installed
from ablate.service.stack.state import StackState, exclusive, is_locked, read_state

_STOP_PATIENCE_S = 45.0
_START_PATIENCE_S = 300.0
_ORPHAN_GRACE_S = 5.0
_RECORD_PATIENCE_S = 2.0
"""A supervisor that has just started, or whose stack.json was removed, writes the file within this time."""
_WORKER_PROGRAM = "-m ablate.workers.app"
_PROBE_PATIENCE_S = 1.0
"""`is_locked` in another process shares the lock for an instant."""


def running(files: StackFiles) -> StackState | None:
    """Return the state of the stack that runs in this home, or None.

    Raises StackError if it runs on another machine or in another container, where this process can stop nothing.
    """
    state = read_state(files) if is_locked(files) else None  # a clean-up also locks, and the state is a dead stack's
    if state is None:
        return None
    if state.number_space and state.number_space != number_space():
        raise StackError(
            f"the stack of {files.home} runs on '{state.host}', in another container or on another machine than this "
            f"command on '{socket.gethostname()}'; nothing was changed. Repeat the command there"
        )
    return state if _supervisor_lives(state) else None


def _supervisor_lives(state: StackState) -> bool:
    start = start_of(state.supervisor_pid)
    return start is not None and state.supervisor_start in (None, start)


def start(files: StackFiles, report: Report, *, with_worker: bool = True) -> StackState:
    """Start the stack in the background, or join a running or starting one, and return when it is ready.

    Raises StackError if it does not start, and then no process is left; or if the running stack has a worker and the
    caller wants none, or the reverse.
    """
    check_installed(with_worker=with_worker)
    clean_stale(files, report)
    if with_worker:
        check_devices(files)
    if is_locked(files):
        report("note", "a stack already runs or starts here")
    else:
        _spawn(files, report, with_worker=with_worker)
    state = _wait_ready(files)
    if (WORKER in state.parts) != with_worker:
        has, option = ("a", f" {NO_WORKER}") if WORKER in state.parts else ("no", "")
        raise StackError(f"the stack of {files.home} already runs and has {has} worker; ablate down, then up{option}")
    return state


def check_devices(files: StackFiles) -> None:
    """Raise StackError if another worker uses the devices of this machine, unless a stack of this home runs."""
    if is_locked(files):
        return
    program = [*OWN_PYTHON, "-m", "ablate.workers.devices.inventory"]
    environment = child_environment({"ABLATE_HOME": str(files.home)})
    problem = subprocess.run(program, capture_output=True, text=True, env=environment, check=False).stdout
    if problem:  # the worker itself says what else is wrong
        queue = f"ablate up {NO_WORKER} takes ablations meanwhile; when it is free, ablate down, then ablate up"
        raise StackError(f"no worker can start here: {problem}. To stop nothing, wait: {queue}")


def clean_stale(files: StackFiles, report: Report) -> int:
    """End processes that a dead supervisor left, remove its files, and return how many processes needed SIGKILL.

    Does nothing while a supervisor runs. It locks the home, so no other start interferes.
    """
    if not files.state.exists() or is_locked(files):
        return 0
    try:
        with exclusive(files, patience_s=_PROBE_PATIENCE_S):
            state = read_state(files)
            if state is None:  # another command has cleaned up meanwhile
                return 0
            count = len(part_processes.stack_mark(state.stack_id).members())
            killed = part_processes.kill_members(state.stack_id, grace_s=_ORPHAN_GRACE_S)
            files.remove_runtime()
    except StackBusy:
        return 0
    report("note", f"ended {count} processes of the stack of {state.started_at}, whose supervisor had died")
    return killed


@dataclass(frozen=True, kw_only=True)
class StopResult:
    """The result of `stop`."""

    was_running: bool
    killed: int
    """Processes that needed SIGKILL, including those of a dead supervisor."""
    seconds: float


def stop(files: StackFiles, report: Report) -> StopResult:
    """Stop the stack of this home and check that none of its processes is left."""
    began = time.monotonic()
    wait_until(lambda: running(files) is not None or not is_locked(files), patience_s=_RECORD_PATIENCE_S)
    state = running(files)
    if state is None:
        return StopResult(was_running=False, killed=clean_stale(files, report), seconds=time.monotonic() - began)
    send([state.supervisor_pid], signal.SIGTERM)
    if not _supervisor_ends(files, state, patience_s=_STOP_PATIENCE_S):
        report("note", f"the supervisor did not end within {_STOP_PATIENCE_S:.0f} s; killing it")
        send([state.supervisor_pid], signal.SIGKILL)
        _supervisor_ends(files, state, patience_s=_ORPHAN_GRACE_S)
    killed = part_processes.kill_members(state.stack_id) + clean_stale(files, report)
    return StopResult(was_running=True, killed=killed, seconds=time.monotonic() - began)


def other_workers(files: StackFiles) -> list[int]:
    """Return the workers of this home that somebody else than its stack started: `ablate worker up`."""
    return [pid for pid in process_numbers() if _WORKER_PROGRAM in command_of(pid) and _is_of(files, pid)]


def _is_of(files: StackFiles, pid: int) -> bool:
    """Return whether a process outside of stacks has this home, which may be relative to its working folder."""
    try:
        folder = Path(f"/proc/{pid}/cwd").readlink()
    except OSError:  # it has ended, or belongs to another user
        return False
    own = folder / (variable_of(pid, "ABLATE_HOME") or ".ablate")
    return variable_of(pid, "ABLATE_STACK_ID") is None and own.resolve() == files.home.resolve()


def _supervisor_ends(files: StackFiles, state: StackState, *, patience_s: float) -> bool:
    """Wait until the lock is free and the process gone: the kernel frees the lock a moment earlier."""
    return wait_until(lambda: not is_locked(files) and not _supervisor_lives(state), patience_s=patience_s)


def _spawn(files: StackFiles, report: Report, *, with_worker: bool) -> None:
    files.make_folders()
    with files.log("supervisor").open("ab") as log:
        daemon = subprocess.Popen(
            [*OWN_PYTHON, "-m", "ablate.service.stack.supervisor", *(() if with_worker else (NO_WORKER,))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env=child_environment({"ABLATE_HOME": str(files.home)}, knows=[WEBHOOK_KEY, SMTP_URL]),
        )
    try:
        _follow(daemon, files, report)
    except BaseException:  # Ctrl-C during the start: no process may be left
        daemon.terminate()
        daemon.wait()
        raise


def _follow(daemon: subprocess.Popen[bytes], files: StackFiles, report: Report) -> None:
    for line in daemon.stdout or ():
        message = json.loads(line)
        if message["kind"] == "failed":
            daemon.wait()
            raise StackError(message["text"])
        report(message["kind"], message["text"])
        if message["kind"] in ("ready", "busy"):
            return
    raise StackError(f"the supervisor ended with exit code {daemon.wait()}; see {files.log('supervisor')}")


def _wait_ready(files: StackFiles) -> StackState:
    deadline = time.monotonic() + _START_PATIENCE_S
    while time.monotonic() < deadline:
        state = running(files)
        if state is not None and state.phase == "ready":
            return state
        if state is None and not is_locked(files):
            raise StackError(f"the starting stack ended; see {files.log('supervisor')}")
        time.sleep(0.1)
    raise StackError(f"the stack was not ready within {_START_PATIENCE_S:.0f} s; see {files.log('supervisor')}")
