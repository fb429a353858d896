"""The order for a trial's process, and the result and step files that it writes."""

import math
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, ValidationError

from ablate.experiments.design.kinds.built_in import BuiltInArm
from ablate.experiments.design.kinds.kind import ArmConfig
from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.digest import SOURCE_ROOT
from ablate.experiments.documents import first_problem
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.compilation_report import CompilationReport
from ablate.experiments.records.program_report import ProgramReport, printable
from ablate.experiments.records.receipts import HeldNode
from ablate.experiments.system.isolation import Isolation, python_folders
from ablate.model.measurements import NOTHING_MEASURED, Step, TrialMeasurements
from ablate.workers.isolation.reach import own_tree_problem, system_folders
from ablate.workers.paths import MOST_OUTPUT, TrialPaths, open_plain

MODULE_FOLDER = SOURCE_ROOT / "experiments" / "in_trial"
"""Folder of the module `ablate`, which commands import."""
MAX_RESULT_BYTES = 64 * 2**20
"""Largest result file, and largest file of steps, that the worker reads."""


@dataclass(frozen=True, kw_only=True)
class TrialOrder:
    """The task of one trainer process."""

    trial_id: str
    config: ArmConfig
    """With the block's seed."""
    paths: TrialPaths
    data_dir: Path
    """Prepared datasets."""
    device_type: str
    """Torch's name for the kind of device to train on."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the node class, set before a tensor exists."""
    devices: int = 1
    """Devices that share a step; of a command, those that it sees."""
    nodes: int = 1
    """Nodes of a cluster over which it runs."""
    topology: str | None = None
    """On a node class that compiles and executes nothing: the topology to compile for."""
    trace_only: bool = False
    """Of a compilation: only trace the step, to check whether every gate can run."""
    cold_caches: bool = False
    """Whether compilers start with empty caches on disk."""
    profile: bool = False
    """Whether the built-in model runs one more step after all measurements, under torch's profiler."""
    trace: bool = False
    """Whether a profiled step is also stored over time."""
    kernels: Path | None = None
    """Caches of compilers on disk, for the versions of this node; None for the compilers' own places."""
    caches: Mapping[str, str] = field(default_factory=dict)
    """Those that the operator has chosen instead, by their environment variables."""
    dataset: Path | None = None
    """Folder of the prepared dataset, or of a command's code; None for a process that needs none."""
    evaluation: Path | None = None
    """Folder of the code of a command's evaluation; None without one."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Values of the node's secrets that the program gets, by their variables."""
    prepare_only: bool = False
    """Only build the dataset from the corpus, or copy the code, so that no trial's time includes it."""
    most_bytes: int = MOST_OUTPUT.bytes
    """Largest file that it may write: as much space as all its files may use."""
    start_by: float = math.inf
    """Boot time at which the lease of the block is over: a later start does nothing."""
    locks: tuple[str, ...] = ()
    """Device locks that the process takes for its whole life."""
    lock_sockets: tuple[socket.socket, ...] = ()
    """Locks that the worker has taken instead, for all trainers of a block in slices."""
    slice_pipe: Connection | None = None
    """Pipe to the worker, for a trial that runs in slices and waits for its turn."""
    corpus_roots: tuple[Path, ...] | None = None
    """Folders of this node that may contain a corpus; None for any."""
    code_roots: tuple[Path, ...] | None = None
    """Folders of this node that may contain the code of commands; None for any."""
    data_roots: tuple[Path, ...] | None = None
    """Files and folders of this node that may contain their data; None for any."""
    environments: Path | None = None
    """Folder for the Python environments that this node builds; None for one in `data_dir`."""
    origin: Path | None = None
    """Folder from which the code was packed, if this machine's user packed it just now."""
    isolation: Isolation | None = None
    """What the process may use; None on a node that isolates no trials."""

    @property
    def model(self) -> BuiltInArm:
        """Configuration of the built-in model. Raises TypeError for another kind of workload."""
        if isinstance(self.config, BuiltInArm):
            return self.config
        raise TypeError(f"{type(self.config).__name__} is no configuration of the built-in model")

    @property
    def program(self) -> ProgramArm:
        """Configuration of a program. Raises TypeError for another kind of workload."""
        if isinstance(self.config, ProgramArm):
            return self.config
        raise TypeError(f"{type(self.config).__name__} is no configuration of a program")

    def isolated(self, hidden: tuple[Path, ...]) -> "TrialOrder":
        """Return this order for an isolated process, from which the folders `hidden` stay closed.

        It reads its dataset, or the corpus to make one from, and writes its own folder and the caches of compilers. A
        preparation writes datasets, too. A command also reads its Python environment and all corpora of the node, and
        may open sockets.
        """
        readable = [*system_folders(), *self._sources()]
        writable = [self.paths.folder]
        if self.prepare_only:
            if self.environments is not None:
                self.environments.mkdir(parents=True, exist_ok=True)
            writable += [self.data_dir, *([] if self.environments is None else [self.environments])]
        self.data_dir.mkdir(parents=True, exist_ok=True)
        readable += [folder for folder in (self.dataset, self.evaluation) if folder is not None]
        caches = [*map(Path, self.caches.values()), *([] if self.kernels is None else [self.kernels])]
        own_process = self.config.own_process
        for cache in [] if own_process else caches:  # a command could leave code in them for other trials
            cache.mkdir(parents=True, exist_ok=True)
            writable.append(cache)
        isolation = Isolation(
            readable=tuple(readable),
            writable=tuple(writable),
            hidden=hidden,
            # XLA's runtime talks to itself over them, and so do the ranks of a trial
            sockets=self.device_type == "xla" or own_process or self.devices > 1,
            programs=own_process or self.device_type == "cuda",  # torch compiles in processes of its own
            own_tree=own_tree_problem() is None,
            own_network=self.device_type != "xla" and not own_process,
        )
        return replace(self, isolation=isolation)

    def _sources(self) -> Iterator[Path]:
        """Yield the files besides the system's that this process reads."""
        if self.prepare_only:
            yield from self.config.sources
        elif self.config.own_process:
            yield MODULE_FOLDER
            yield from self.config.libraries
            yield from self.corpus_roots or ()
            yield from [] if self.program_prefix is None else python_folders(self.program_prefix)

    program_prefix: Path | None = None
    """Folder of the Python environment of a command; None for the worker's own."""


class TrialResult(TrialMeasurements):
    """The trainer's result file. Its steps are in a file of their own, written as they came, except a command's."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    failure_class: FailureClass | None = None
    message: str | None = None
    data_digest: str | None = None
    val_digest: str | None = None
    """Of tokenizer and validation rows."""
    data_folder: Path | None = None
    program_prefix: Path | None = None
    """Folder of the Python environment that the node built for it."""
    """Folder of the dataset on this node."""
    compilation: CompilationReport | None = None
    """Of a trial that compiled and executed nothing."""
    program: ProgramReport | None = None
    """Of a trial that ran a command."""
    nodes: tuple[HeldNode, ...] = ()
    """Of a trial over several."""
    program_steps: tuple[Step, ...] = ()
    """All steps of a command: losses and the slowest process are known only at its end."""
    own_steps: int | None = None
    """Steps of a command's loop outside of a trial; None if it passes no number."""

    @classmethod
    def partial(cls, **fields: Any) -> Self:
        """Return the result of a trial that ended early, or measured only some numbers."""
        return cls(**{**NOTHING_MEASURED, **fields})


def read_steps(path: Path) -> tuple[Step, ...]:
    """Return the steps that a trial wrote before it ended, up to the first line that is no step."""
    steps = []
    whole, _newline, _torn = _read(path).rpartition(b"\n")
    for line in whole.splitlines():
        try:
            steps.append(Step.model_validate_json(line))
        except ValidationError:
            break
    return tuple(steps)


def read_result(path: Path) -> TrialResult | None:
    """Return the trial's result, None if it wrote none; a file that is no result is the arm's failure."""
    content = _read(path)
    if not content:
        return None
    try:
        return TrialResult.model_validate_json(content)
    except ValidationError as error:
        problem = printable(f"the trial wrote a result file that is no result: {first_problem(error)}")
        return TrialResult.partial(failure_class=FailureClass.USER_ERROR, message=problem)


def _read(path: Path) -> bytes:
    """Return a file's content, cut at `MAX_RESULT_BYTES`; nothing if there is no regular file."""
    try:
        with open_plain(path) as file:
            return file.read(MAX_RESULT_BYTES)
    except FileNotFoundError:
        return b""
