"""A trial over several nodes: srun starts a part on each node of the allocation, and its outputs are the whole trial.

The cluster's launcher does the rest: it passes on the order, the outputs and signals, and ends what is left. This
process runs nothing of the program's, so it is not isolated itself: srun needs the keys by which Slurm knows its user.
"""

import json
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.receipts import HeldNode
from ablate.experiments.system.processes import OWN_PYTHON, die_with_parent
from ablate.workers.commands import node_part
from ablate.workers.commands.device_samples import DeviceSamples
from ablate.workers.commands.node_part import LAST, FactsOrder, PartOrder
from ablate.workers.commands.program import Load, MarksFollower, finished
from ablate.workers.commands.program_end import ProgramEnd, ProgramRun, exit_words, program_failure
from ablate.workers.commands.program_socket import ProgramMessage
from ablate.workers.commands.ranks import ProgramMarks
from ablate.workers.environment_variables import allocated_nodes, slurm_job
from ablate.workers.errors import AllocationUnfit
from ablate.workers.isolation.environment import environment_with_packages
from ablate.workers.isolation.node_secrets import Mask
from ablate.workers.trials.result import TrialOrder, TrialResult

_PATIENCE_S = 5.0
"""Time that the other nodes have to end after the program failed on one."""
_FACTS_S = 300.0
"""Time in which all nodes of an allocation have to describe themselves."""
_END_S = 60.0
"""Time in which Slurm has to end a step; its KillWait is 30 s by default."""
_POLL_S = 0.2
_PROGRAM = f"import sys; from {node_part.__name__} import main; sys.exit(main())"
"""Not `-m`, which would import the module a second time by another name."""


def node_names(data_dir: Path) -> tuple[str, ...]:
    """Return the names of the nodes of this worker's allocation, which are alike and share `data_dir`.

    Raises AllocationUnfit with the first difference, or with the words of srun.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    facts: dict[str, dict[str, str]] = {}
    with tempfile.NamedTemporaryFile(dir=data_dir, prefix=".shared-") as shared, tempfile.TemporaryFile() as log:
        step = _Step(FactsOrder(shared=Path(shared.name)), allocated_nodes(), log)
        for line in step.lines(late=lambda: time.monotonic() > step.began + _FACTS_S):
            facts[line["node"]] = line["facts"]
        code = step.end()
        if code or len(facts) < step.num_nodes:
            log.seek(0)
            words = " ".join(log.read().decode("utf-8", "replace").split())[-500:]
            raise AllocationUnfit(
                f"srun started {len(facts)} of {step.num_nodes} nodes and {exit_words(code)}: {words}; the worker "
                "needs the same Python environment on each, and a job with one task on each"
            )
    first, *others = sorted(facts)
    for other in others:
        for name, value in facts[first].items():
            if facts[other].get(name) != value:
                raise AllocationUnfit(
                    f"the nodes of this allocation differ: {name} is {value} on {first}, and "
                    f"{facts[other].get(name, 'unknown')} on {other}; ask for equal nodes (--constraint), and set "
                    "ABLATE_DATA_DIR to a folder that they share"
                )
    return (first, *others)


def run_on_nodes(order: TrialOrder) -> TrialResult:
    """Run the command of `order` on all nodes of the allocation; return the result, which may be a failure."""
    if end_steps(patience_s=_END_S):
        raise OSError(f"Slurm did not end the step of an earlier trial within {_END_S:.0f} s")
    config, parts = order.program, _TrialParts(order)
    with order.paths.log.open("ab") as log, order.paths.steps.open("w", buffering=1, encoding="utf-8") as steps:
        progress = MarksFollower(config, steps, Load(), DeviceSamples(0))
        step = _Step(PartOrder(order=order, port=_free_port()), config.nodes, log)
        for line in step.lines(late=parts.is_late):
            parts.take(line, progress)
        code = step.end()
    return parts.result(code)


class _Step:
    """A step of Slurm with one task on each node."""

    def __init__(self, order: PartOrder | FactsOrder, num_nodes: int, log: BinaryIO) -> None:
        self.num_nodes, self.began = num_nodes, time.monotonic()
        self._process = subprocess.Popen(
            [
                *("srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"),
                *("--cpu-bind=none", "--chdir=/", "--label", *OWN_PYTHON, "-c", _PROGRAM),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={name: value for name, value in environment_with_packages().items() if name != "TMPDIR"},
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise AssertionError("both are pipes")
        self._output = self._process.stdout
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # srun could not start
            pickle.dump(order, stdin)

    def lines(self, *, late: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """Yield the messages of all parts as they arrive; end the step when it is `late`."""
        torn, messages, killed_at = b"", defaultdict[str, str](str), math.inf
        while True:
            if late() and math.isinf(killed_at):
                self._process.terminate()  # srun passes it on
                killed_at = time.monotonic() + _END_S
            if time.monotonic() > killed_at:
                self._process.kill()
            if not select.select([self._output], [], [], _POLL_S)[0]:
                continue
            data = os.read(self._output.fileno(), 65536)
            if not data:
                return
            *whole, torn = (torn + data).split(b"\n")
            for line in whole:
                task, _colon, text = line.decode("ascii").partition(": ")
                messages[task] += text[1:]
                if text.startswith(LAST):
                    yield json.loads(messages.pop(task))

    def end(self) -> int:
        """Return the exit code of srun, which has closed its output."""
        self._output.close()
        return self._process.wait()


class _TrialParts:
    """What the parts of a trial have said so far."""

    def __init__(self, order: TrialOrder) -> None:
        self._order, self._config = order, order.program
        self._marks = ProgramMarks(self._config, Mask(order.secrets))
        self._node_of_rank: dict[int, str] = {}
        self._ended: dict[str, Mapping[str, Any]] = {}
        """By node, in the order of their ends."""
        self._failed: tuple[str, FailureClass, str] | None = None
        """The first part that could not run: its node, and why."""
        self._late_at = math.inf

    def is_late(self) -> bool:
        """Return whether parts still run although the program failed on another node some time ago."""
        return time.monotonic() > self._late_at

    def take(self, line: Mapping[str, Any], progress: MarksFollower) -> None:
        """Store a message of a part."""
        node = line["node"]
        if "mark" in line:
            content = line["mark"].encode("latin-1")
            arrived = ProgramMessage(content=content, seen=line["seen"], sender=line["sender"])
            mark = progress.note(arrived, self._marks)
            if mark is not None:
                self._node_of_rank[mark.rank] = node
            return
        if "failed" in line:
            failure, message = line["failed"]
            self._failed = self._failed or (node, FailureClass(failure), message)
        else:
            self._ended[node] = line
        if "failed" in line or _is_bad(line["end"]):
            self._late_at = min(self._late_at, time.monotonic() + _PATIENCE_S)

    def result(self, code: int) -> TrialResult:
        """Return the result of the trial, after srun has ended."""
        failure: tuple[FailureClass, str] | None = None
        bad = next((line for line in self._ended.values() if _is_bad(line["end"])), None)
        if self._failed is not None:
            node, kind, message = self._failed
            failure = kind, f"node {node}: {message}"
        elif bad is None and len(self._ended) < self._config.nodes:
            there = ", ".join(self._ended) or "none"
            failure = (
                FailureClass.INFRA_NODE,
                f"srun {exit_words(code)} before all {self._config.nodes} nodes had ended their parts (ended: "
                f"{there}); the end of the trial's log says why",
            )
        if not self._ended:
            kind, message = failure or (FailureClass.INFRA_NODE, "no node ran its part")
            return TrialResult.partial(failure_class=kind, message=message)
        end = self._end(bad)
        failure = failure or program_failure(self._config, end)
        ran = ProgramRun(
            end=end,
            marks=self._marks,
            reported=end.reported,
            samples=self._samples(),
            measured=self._measured(),
            node_of_rank={rank: node for rank, node in self._node_of_rank.items() if rank in self._marks.loops},
        )
        nodes = tuple(HeldNode.model_validate(self._ended[node]["held"]) for node in sorted(self._ended))
        return finished(self._order, ran, failure).model_copy(update={"nodes": nodes})

    def _end(self, bad: Mapping[str, Any] | None) -> ProgramEnd:
        """Return the end of the whole program: that of the first part that failed, with the results of all."""
        ends = [self._ended[node]["end"] for node in sorted(self._ended)]
        own = ends[0] if bad is None else bad["end"]
        changes: dict[str, Any] = {
            "who": "the program" if bad is None else f"the program on node {bad['node']}",
            "oom_kills": sum(end["oom_kills"] for end in ends),
            "failed": self._marks.failed,
            "wrong": self._marks.wrong,
            "loops": self._marks.loops,
        }
        for name in ("reported", "contradicted"):
            changes[name] = {key: value for end in reversed(ends) for key, value in end[name].items()}
        changes["reported"] |= self._marks.reported
        changes |= {name: tuple(own[name]) for name in ("lost", "left")}
        return ProgramEnd(**{**own, **changes})

    def _samples(self) -> DeviceSamples:
        """Return the clocks of the node with the slowest rank, and the peak of memory over all."""
        samples, loops = DeviceSamples(0), self._marks.loops
        whole = [number for number, rank in loops.items() if rank.is_whole(self._config.steps)]
        if whole:
            slowest = max(whole, key=lambda number: loops[number].longest_s)
            samples.clocks = [tuple(one) for one in self._ended.get(self._node_of_rank[slowest], {}).get("clocks", ())]
        peaks = [line["peak"] for line in self._ended.values() if line["peak"] is not None]
        samples.peak_bytes = max(peaks, default=None)
        return samples

    def _measured(self) -> dict[str, Any]:
        """Return what was measured beside the steps: the sum of processor time, and otherwise the largest number."""
        columns = [line["measured"] for line in self._ended.values()]
        measured: dict[str, Any] = {}
        for name in set(columns[0]).intersection(*columns[1:]) - {"facts", "flops_per_step"}:
            values = [column[name] for column in columns]
            whole = sum if name == "cpu_s" else max
            measured[name] = None if None in values else whole(values)
        if self._config.attested:
            measured |= {"facts": dict(self._marks.attested), "flops_per_step": self._config.flops_per_step}
        return measured


def _is_bad(end: Mapping[str, Any]) -> bool:
    return bool(end["exit_code"] or end["lost"] or end["left"] or end["stopped"] or end["unread"])


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def end_steps(*, patience_s: float) -> list[str]:
    """End what a trial left on other nodes: one whose process was killed, srun with it. Return the steps that are left.

    Raises OSError if Slurm does not say.
    """
    deadline = time.monotonic() + patience_s
    while steps := [step for step in _steps() if step.rpartition(".")[2].isdigit()]:
        subprocess.run(["scancel", "--signal=KILL", *steps], check=False, capture_output=True)
        if time.monotonic() >= deadline:
            return steps
        time.sleep(_POLL_S)
    return []


def _steps() -> list[str]:
    """Return the steps of this job, that of its script included. Raises OSError if Slurm does not say."""
    command = ["squeue", "--noheader", "--steps", f"--jobs={slurm_job()}", "--format=%i"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"squeue cannot list the steps of this job: {done.stderr.strip()}")
    return done.stdout.split()
