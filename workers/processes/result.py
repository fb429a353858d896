"""What a trial's process tells its worker: an order on the way in, a result file on the way out."""

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
    """What one trainer process has to do."""

    trial_id: str
    config: Mapping[str, Any]
    """TrainConfig as JSON."""
    paths: TrialPaths
    data_dir: Path
    device_type: str
    """Torch's name for the kind of device to train on."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the node class needs in the environment before a tensor is made."""
    topology: str | None = None
    """On a node class that compiles and executes nothing: what for."""
    trace_only: bool = False
    """Of a compilation: only trace the step, to see whether every gate can run."""
    cold_caches: bool = False
    """Whether compilers start with empty caches on disk."""
    dataset: Path | None = None
    """Folder of the dataset if it was prepared before; otherwise the trial looks for it, or builds it."""
    prepare_only: bool = False
    """Build the dataset and stop, so that no trial pays for it."""
    start_by: float = math.inf
    """Boot time after which it is too late to begin: the lease of the block is over then."""
    locks: tuple[str, ...] = ()
    """Device locks that the process takes, and holds for its whole life."""
    held: tuple[socket.socket, ...] = ()
    """The same, taken already: by the worker, for all trainers of a block that are in memory together."""
    others: Connection | None = None
    """Where a trial that runs in slices says that it waits, and hears that it may go on."""
    corpus_roots: tuple[Path, ...] | None = None
    """Folders of this node that a corpus may lie in; None for any."""


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
    """Return the steps that a trial wrote before it ended; a torn last line does not count."""
    if not path.is_file():
        return ()
    whole, _newline, _torn = path.read_bytes().rpartition(b"\n")
    return tuple(Step.model_validate_json(line) for line in whole.splitlines())


def read_result(path: Path) -> TrialResult | None:
    """Return the trial's result, or None when it left none."""
    if not path.is_file():
        return None
    return TrialResult.model_validate_json(path.read_bytes())
