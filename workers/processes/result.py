"""What a trial's process tells its worker: an order on the way in, a result file on the way out."""

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from experiments.documents import Frozen
from experiments.outcomes import FailureClass
from experiments.records.compilation_report import CompilationReport
from experiments.records.receipts import Step
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


class TrialResult(Frozen):
    """What the trial says about itself. Its steps are in their own file, written as they came.

    A field is filled from that of the same name of `model.training.train.TrainResult`, and fills that of the receipt.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")

    failure_class: FailureClass | None = None
    message: str | None = None
    data_digest: str | None = None
    data_folder: Path | None = None
    """Where the dataset lies on this node."""
    loss_val: float | None = None
    compile_s: float = 0.0
    compile_cache_hit: bool | None = None
    facts: Mapping[str, Any] = {}
    kernels: tuple[Mapping[str, Any], ...] = ()
    """One row per generated kernel that ran."""
    parameters: int = 0
    flops_per_step: int = 0
    warmup_passes: tuple[float, ...] = ()
    foreign_load: float | None = None
    """Share of the cores' time, from the warm-up to the window's end, that went to others."""
    stolen_load: float | None = None
    """What of it a hypervisor gave to other machines."""
    training_began_s: float | None = None
    waited_s: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    training_s: float = 0.0
    compilation: CompilationReport | None = None
    """Of a trial that compiled and trained nothing."""


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
