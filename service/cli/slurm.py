"""Workers that Slurm starts: the job script, and as many jobs as the waiting work asks for.

Slurm says which jobs there are, and the service how much work waits, so a call needs no memory of earlier ones.
"""

import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ablate.experiments.reporting.wording import counted, duration
from ablate.experiments.system.setting_values import PREFIX
from ablate.service.errors import FleetError
from ablate.service.schemas.nodes import WaitingPublic

_WORD = re.compile(r"[!-~]+")
_SETTING = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=[^\n\r\0]*")
_ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "COMPLETING", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
    | {"PREEMPTED", "REVOKED", "TIMEOUT"}
)
"""States of jobs that run no worker any more; every other one does, or will."""
_FAILED = frozenset({"BOOT_FAIL", "FAILED", "OUT_OF_MEMORY"})
_MOST_FAILURES = 3
"""Failed jobs that Slurm still lists (MinJobAge, five minutes by default) after which no other is submitted. More if
more are wanted."""
_MARGIN_S = 60
"""Most time between the end that a worker is told and that of its job."""
_START_S = 120
"""Time that a worker needs before it can claim a block."""
_TIMEOUT_S = 60.0

_SCRIPT = """\
#!/bin/bash
{options}
unset "${{!ABLATE_@}}"  # of the shell that submitted this job
{exports}
ABLATE_HOME=$(mktemp -d) || exit 1
export ABLATE_HOME
trap 'rm -rf "$ABLATE_HOME"' EXIT
ABLATE_ENROLMENT_TOKEN=$(cat {token_file}) || exit 1
export ABLATE_ENROLMENT_TOKEN
{setup}
{program} worker up --exit-when-idle {idle_s}s --until "$(date -u -d '+{until_s} seconds' +%FT%TZ)" &
worker=$!
trap 'kill -USR1 $worker' USR1  # the early signal: the block ends, or goes back
trap 'kill -INT $worker' TERM   # scancel and preemption: it goes back at once
while kill -0 $worker 2> /dev/null; do wait $worker; code=$?; done
wait $worker 2> /dev/null; last=$?  # it may have ended while a trap ran
[ $last = 127 ] && exit ${{code:-1}}
exit $last
"""


@dataclass(frozen=True, kw_only=True)
class SlurmFleet:
    """Jobs of one node class. Raises FleetError for values that a job script cannot hold, or that cannot work."""

    name: str
    node_class: str
    devices: int
    """Of each node."""
    nodes: int
    """Of a job."""
    url: str
    token_file: Path
    program: str
    time_s: int
    signal_s: int
    idle_s: int
    options: tuple[str, ...]
    """Of sbatch, such as --partition=gpu."""
    settings: tuple[str, ...]
    """NAME=value, for the worker's environment."""
    setup: tuple[str, ...]
    """Lines of the shell before the worker."""

    def __post_init__(self) -> None:
        for option in self.options:
            if not _WORD.fullmatch(option) or not option.startswith("-"):
                raise FleetError(f"{option!r} is no option of sbatch; allowed: one word, such as --partition=gpu")
        for setting in self.settings:
            if not _SETTING.fullmatch(setting):
                raise FleetError(f"--set is {setting!r}; allowed: NAME=value, such as ABLATE_ACCEPT_CODE=true")
        if self.nodes > 1 and not any(setting.startswith("ABLATE_DATA_DIR=") for setting in self.settings):
            raise FleetError(
                "the nodes of a job share the prepared code: name a folder that they all see, --caches DIR"
            )
        if self.time_s < 60 or self.signal_s >= self.time_s:
            raise FleetError(
                f"a job of {duration(self.time_s)} with a signal {duration(self.signal_s)} before its end does "
                "no work; allowed: --time of a minute or more, and a shorter --signal"
            )

    @property
    def _margin_s(self) -> int:
        return min(_MARGIN_S, self.signal_s // 2)

    @property
    def _until_s(self) -> int:
        return self.time_s - self._margin_s

    def script(self) -> str:
        """Return the job script."""
        own = [
            f"--job-name={self.name}",
            f"--time={_slurm_time(self.time_s)}",
            f"--signal=B:USR1@{self.signal_s}",
            "--open-mode=append",
            *([f"--nodes={self.nodes}", "--ntasks-per-node=1"] if self.nodes > 1 else []),
            *self.options,
        ]
        exports = [f"ABLATE_URL={self.url}", f"ABLATE_NODE_CLASS={self.node_class}"]
        exports += [f"ABLATE_DRAIN_S={self.signal_s - self._margin_s}", *self.settings]
        quoted = (setting.partition("=")[::2] for setting in exports)
        return _SCRIPT.format(
            options="\n".join(f"#SBATCH {option}" for option in own),
            exports="\n".join(f"export {name}={shlex.quote(value)}" for name, value in quoted),
            token_file=shlex.quote(str(self.token_file)),
            setup="\n".join(self.setup),
            program=shlex.quote(self.program),
            idle_s=self.idle_s,
            until_s=self._until_s,
        )

    def wanted(self, waiting: Iterable[WaitingPublic], *, work_s: int, most: int) -> int:
        """Return how many jobs the waiting work asks for: one for `work_s` of each device, at most one for each block.

        Raises FleetError if no block fits into the time of a job: such jobs would come and go for nothing.
        """
        own = (self.node_class, self.devices, self.nodes)
        row = next((row for row in waiting if (row.node_class, row.devices, row.nodes_each) == own), None)
        if row is None:
            return 0
        if row.least_s > self._until_s - _START_S:
            raise FleetError(
                f"a block of class {self.node_class} that waits may take {duration(row.least_s)}, and a job has "
                f"{duration(max(0, self._until_s - _START_S))} for it; raise --time, or lower limits.trial of its spec"
            )
        return min(most, row.blocks, math.ceil(row.device_minutes * 60 / self.devices / self.nodes / work_s))


def _slurm_time(seconds: int) -> str:
    """Return a time limit as Slurm writes it, in whole minutes."""
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


@dataclass(frozen=True)
class Jobs:
    """The jobs of a fleet that Slurm lists."""

    alive: int
    """That run, wait or start."""
    pending: tuple[str, ...]
    failed: int

    @classmethod
    def read(cls, name: str) -> "Jobs":
        """Ask Slurm. Raises FleetError."""
        text = call("squeue", "--me", "--noheader", "--array", "--states=all", f"--name={name}", "--format=%i|%T")
        rows = [line.strip().rpartition("|")[::2] for line in text.splitlines() if "|" in line]
        return cls(
            alive=sum(state not in _ENDED for _, state in rows),
            pending=tuple(job for job, state in rows if state == "PENDING"),
            failed=sum(state in _FAILED for _, state in rows),
        )


def adjust(fleet: SlurmFleet, number: int, *, array: bool) -> str:
    """Submit jobs until `number` run or wait, or cancel some that wait; return what was done in words.

    Raises FleetError if Slurm refuses, or if jobs of this fleet failed shortly before.
    """
    jobs = Jobs.read(fleet.name)
    missing = number - jobs.alive
    have = f"{number} wanted, {jobs.alive} there ({len(jobs.pending)} of them wait)"
    if missing > 0:
        if jobs.failed >= max(_MOST_FAILURES, number):
            raise FleetError(
                f"{counted(jobs.failed, 'job')} of {fleet.name} failed within the last minutes, so no other is "
                "submitted; their logs (--logs) say why"
            )
        return f"{have}; submitted {', '.join(submit(fleet, missing, array=array))}"
    surplus = jobs.pending[::-1][: max(0, -missing)]
    if surplus:
        call("scancel", "--state=PENDING", *surplus)  # one that has started in the meantime goes on
        return f"{have}; cancelled {', '.join(surplus)}"
    return have


def submit(fleet: SlurmFleet, number: int, *, array: bool) -> Sequence[str]:
    """Submit jobs, as one array or each alone; return their ids. Raises FleetError."""
    script = fleet.script()
    if array:
        return [_id(call("sbatch", "--parsable", f"--array=1-{number}", stdin=script))]
    return [_id(call("sbatch", "--parsable", stdin=script)) for _ in range(number)]


def _id(answer: str) -> str:
    return answer.strip().partition(";")[0]


def call(program: str, *arguments: str, stdin: str = "") -> str:
    """Run a program of Slurm without our settings, which Slurm would store with the job. Raises FleetError."""
    if shutil.which(program) is None:
        raise FleetError(
            f"{program} is not installed here; run this where people submit jobs, or use --print for the script alone"
        )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    command = [program, *arguments]
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise FleetError(f"{program} did not answer within {timedelta(seconds=_TIMEOUT_S)}") from None
    if done.returncode:
        raise FleetError(f"{shlex.join(command)} refused ({done.returncode}): {done.stderr.strip()}")
    return done.stdout
