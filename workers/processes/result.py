"""The order for a trial's process, and the result and step files that it writes."""

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict

from experiments.outcomes import FailureClass
from experiments.records.compilation_report import CompilationReport
from model.measurements import NOTHING_MEASURED, Step, TrialMeasurements
from workers.paths import TrialPaths


@dataclass(frozen=True, kw_only=True)
class TrialOrder:
    """The task of one trainer process."""

    trial_id: str
    config: Mapping[str, Any]
    """TrainConfig as JSON."""
    paths: TrialPaths
    data_dir: Path
    """Prepared datasets."""
    device_type: str
    """Torch's name for the kind of device to train on."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the node class, set before a tensor exists."""
    topology: str | None = None
    """On a node class that compiles and executes nothing: the topology to compile for."""
    trace_only: bool = False
    """Of a compilation: only trace the step, to check whether every gate can run."""
    cold_caches: bool = False
    """Whether compilers start with empty caches on disk."""
    kernels: Path | None = None
    """Caches of compilers on disk, for the versions of this node; None for the compilers' own places."""
    dataset: Path | None = None
    """Folder of the prepared dataset; None for a process that trains on none."""
    prepare_only: bool = False
    """Only read the corpus and build the dataset, so that no trial's time includes it."""
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


class TrialResult(TrialMeasurements):
    """The trainer's result file. Its steps are in a file of their own, written as they came."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    failure_class: FailureClass | None = None
    message: str | None = None
    data_digest: str | None = None
    data_folder: Path | None = None
    """Folder of the dataset on this node."""
    compilation: CompilationReport | None = None
    """Of a trial that compiled and executed nothing."""

    @classmethod
    def partial(cls, **fields: Any) -> Self:
        """Return the result of a trial that ended early, or measured only some numbers."""
        return cls(**{**NOTHING_MEASURED, **fields})


def read_steps(path: Path) -> tuple[Step, ...]:
    """Return the steps that a trial wrote before it ended; an incomplete last line does not count."""
    if not path.is_file():
        return ()
    whole, _newline, _torn = path.read_bytes().rpartition(b"\n")
    return tuple(Step.model_validate_json(line) for line in whole.splitlines())


def read_result(path: Path) -> TrialResult | None:
    """Return the trial's result, None if it wrote none."""
    if not path.is_file():
        return None
    return TrialResult.model_validate_json(path.read_bytes())
