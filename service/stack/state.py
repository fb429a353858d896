"""stack.json and the lock beside it: who runs the stack of a home, and where it can be reached."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from service.errors import StackBusy, StackError
from service.stack.layout import StackFiles


class PartPhase(StrEnum):
    """How a part of the stack is."""

    STARTING = "starting"
    """Its process runs and did not answer yet."""
    READY = "ready"
    """It answered since its process started."""
    RESTARTING = "restarting"
    """It ended by itself and starts again after a pause."""
    GIVEN_UP = "given_up"
    """It ended too often in a row and stays down."""


class PartState(BaseModel):
    """One part in stack.json."""

    model_config = ConfigDict(frozen=True)

    phase: PartPhase
    restarts: int = 0
    """How often it was started again."""


class StackFinding(BaseModel):
    """Something that happened to a part by itself."""

    model_config = ConfigDict(frozen=True)

    part: str
    at: str
    what: str
    then: str
    """What follows."""


class StackState(BaseModel):
    """What stack.json says."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    stack_id: str
    """Every process of the stack carries it in its environment."""
    phase: Literal["starting", "ready", "stopping"]
    api_url: str
    mlflow_url: str
    ablations_url: str
    """Where MLflow lists the ablations, for people."""
    broker_url: str
    broker_port: int | None = None
    """Where other machines reach the broker, with the password in tokens/broker; None when they cannot."""
    supervisor_pid: int
    pids: dict[str, int] = {}
    """The present process of every part; the last one of a part that is down."""
    parts: dict[str, PartState] = {}
    findings: tuple[StackFinding, ...] = ()
    """The latest, oldest first; the supervisor's log has all of them."""
    started_at: str

    @property
    def is_whole(self) -> bool:
        """Whether every part does its work."""
        return all(part.phase == PartPhase.READY for part in self.parts.values())


def read_state(files: StackFiles) -> StackState | None:
    """Return the recorded state, None when there is none; a file that cannot be read is an error."""
    try:
        return StackState.model_validate_json(files.state.read_text())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise StackError(f"{files.state} is damaged; remove it when no stack runs there") from error


def write_state(files: StackFiles, state: StackState) -> None:
    """Replace stack.json in one step, so that a reader never sees half of it."""
    fresh = files.state.with_suffix(".json.new")
    fresh.write_text(state.model_dump_json(indent=2) + "\n")
    fresh.replace(files.state)


@contextmanager
def exclusive(files: StackFiles, *, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the home's lock; raises StackBusy when another process holds it for longer than `patience_s`.

    The kernel drops the lock when its holder dies, however it dies. `is_locked` shares it for an instant.
    """
    files.lock.parent.mkdir(parents=True, exist_ok=True)
    with _lock(files, fcntl.LOCK_EX, patience_s=patience_s):
        yield


def is_locked(files: StackFiles) -> bool:
    """Whether a supervisor lives in this home."""
    if not files.lock.exists():
        return False
    try:
        with _lock(files, fcntl.LOCK_SH):  # shared: two who ask at once do not take each other for a supervisor
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
