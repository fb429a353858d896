"""stack.json and its lock: the state and the addresses of a home's stack."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ablate.experiments.documents import write_whole
from ablate.service.errors import StackBusy, StackError
from ablate.service.stack.layout import StackFiles


class PartPhase(StrEnum):
    """The phase of a part."""

    STARTING = "starting"
    """Its process runs but has not answered yet."""
    READY = "ready"
    """Its current process has answered."""
    RESTARTING = "restarting"
    """It failed and restarts after a pause."""
    GIVEN_UP = "given_up"
    """It failed too often in a row and stays down."""


class PartState(BaseModel):
    """One part in stack.json."""

    model_config = ConfigDict(frozen=True)

    phase: PartPhase
    restarts: int = 0
    """Number of restarts."""


class StackFinding(BaseModel):
    """A failure of a part."""

    model_config = ConfigDict(frozen=True)

    part: str
    at: str
    what: str
    then: str
    """The consequence."""


class StackState(BaseModel):
    """The contents of stack.json."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    stack_id: str
    """Every process of the stack has it in its environment."""
    phase: Literal["starting", "ready", "stopping"]
    api_url: str
    mlflow_url: str
    """Base of MLflow's pages for people who are signed in."""
    mlflow_port: int
    """Port of the MLflow server, which asks for the password in tokens/mlflow."""
    ablations_url: str
    """MLflow's list of ablations, as a link for a browser."""
    broker_url: str
    """Without its password, which is in tokens/broker."""
    broker_port: int | None = None
    """Port of the broker for other machines. None: not reachable from there."""
    supervisor_pid: int
    supervisor_start: int | None = None
    """When that process started, in clock ticks since boot; another process may get its number."""
    host: str = ""
    """Name of the machine or the container of the supervisor."""
    number_space: str = ""
    """Its boot and process namespace: elsewhere its process numbers belong to other processes."""
    pids: dict[str, int] = {}
    """The current process of every part, or the last one of a part that is down."""
    parts: dict[str, PartState] = {}
    findings: tuple[StackFinding, ...] = ()
    """The latest failures, oldest first. The supervisor's log has all of them."""
    started_at: str

    @property
    def is_whole(self) -> bool:
        """Whether every part is ready."""
        return all(part.phase == PartPhase.READY for part in self.parts.values())


def read_state(files: StackFiles) -> StackState | None:
    """Return the recorded state, or None without a file. Raises StackError for a damaged one."""
    try:
        return StackState.model_validate_json(files.state.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise StackError(
            f"{files.state} cannot be read: {problem}; remove it, then run: ablate up (a running stack writes it again)"
        ) from error


def write_state(files: StackFiles, state: StackState) -> None:
    """Replace stack.json atomically."""
    write_whole(files.state, state.model_dump_json(indent=2) + "\n")


@contextmanager
def exclusive(files: StackFiles, *, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the home's lock. Raises StackBusy if another process keeps it for more than `patience_s` seconds.

    The kernel releases the lock when its holder dies. `is_locked` shares it for an instant.
    """
    files.lock.parent.mkdir(parents=True, exist_ok=True)
    with _lock(files, fcntl.LOCK_EX, patience_s=patience_s):
        yield


def is_locked(files: StackFiles) -> bool:
    """Return whether a supervisor runs in this home."""
    if not files.lock.is_file():
        return False
    try:
        with _lock(files, fcntl.LOCK_SH):  # shared: two callers at once do not see each other
            return False
    except StackBusy:
        return True


@contextmanager
def _lock(files: StackFiles, kind: int, *, patience_s: float = 0.0) -> Iterator[None]:
    descriptor = os.open(files.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _take(descriptor, files.lock, kind, patience_s)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, path: Path, kind: int, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise StackBusy(f"another stack holds {path}") from error
            time.sleep(0.02)
        else:
            return
