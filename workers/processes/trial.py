"""The trainer's side of a trial: a fresh process, forked from a server that has torch imported.

Imports torch only inside functions: the worker itself imports this module to name its target, and needs no torch.
"""

import json
import multiprocessing
import os
import shutil
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.design.fields import read_config
from experiments.runtime.processes import die_with_parent
from kernels.errors import KernelUnsupported
from model.config import TrainConfig
from workers.devices.device_lock import TRAINER_PATIENCE_S, DeviceLock
from workers.environment_variables import keep_kernels, mark_process, peer_site, start_cold, use_environment
from workers.errors import DeviceMissing
from workers.lease import boot_time_s
from workers.paths import write_whole
from workers.processes.compile_trial import compile_step
from workers.processes.failures import CANNOT_WRITE, TOO_LATE, classify
from workers.processes.result import TrialOrder, TrialResult
from workers.processes.slice_pipe import yield_to_others

if TYPE_CHECKING:
    import torch

    from model.data.dataset import Dataset
    from model.measurements import Step

from collections.abc import Sequence

from model.data.corpus import TORCH_HEADERS
from model.errors import DataError


def check_corpus(corpus: str, roots: Sequence[Path] | None) -> None:
    """Raise DataError unless `corpus`, links and `..` followed, lies in one of `roots`; None allows any folder.

    Files below it need no look of their own: a corpus leaves links out (model/data/corpus.py).
    """
    if roots is None or corpus == TORCH_HEADERS:
        return
    folder = Path(corpus).resolve()
    if any(folder.is_relative_to(root.resolve()) for root in roots):
        return
    listed = "".join(f", or a folder below {root}" for root in roots)
    raise DataError(
        f"corpus {corpus!r} is outside of what this node's operator allows to be read; allowed: '{TORCH_HEADERS}'"
        f"{listed} (ABLATE_CORPUS_DIRS)"
    )


_MESSAGE_LIMIT = 2000  # characters


def main(order: TrialOrder) -> None:
    """Run one trial and leave its result file; one that cannot write ends with the exit code `CANNOT_WRITE`."""
    try:
        _run(order)
    except OSError:
        os._exit(CANNOT_WRITE)


def _run(order: TrialOrder) -> None:
    """Leave the result file of a trial. Every exception of its work ends here, classified and written down."""
    _detach(order)
    target = order.paths.prepared if order.prepare_only else order.paths.result
    held = DeviceLock(order.locks)  # given back by the end of this process
    try:
        held.take(patience_s=TRAINER_PATIENCE_S)
        use_environment(order.environment)
        result = _work(order)
    except Exception as error:  # the task boundary: the result file records it
        traceback.print_exc()
        result = TrialResult.partial(failure_class=classify(error), message=_describe(error))
    sys.stdout.flush()
    sys.stderr.flush()
    write_whole(target, result.model_dump_json())


def _detach(order: TrialOrder) -> None:
    """Own session and group, death with the parent, output into the trial's log, no input."""
    os.setsid()
    _die_with_the_worker()
    if boot_time_s() > order.start_by:
        os._exit(TOO_LATE)
    mark_process(order.trial_id)
    log = os.open(order.paths.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(nothing)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _die_with_the_worker() -> None:
    """End with the fork server, which ends with the worker; at once, when either is gone already.

    A server that lost its worker while it imported torch still starts the trial that was on its way to it.
    """
    preload = sys.modules.get(
        "workers.processes.preload"
    )  # inherited from the server; one that failed to import it has none
    die_with_parent(parent=None if preload is None else preload.SERVER_PID)
    worker = multiprocessing.parent_process()
    if worker is not None and not worker.is_alive():
        os._exit(1)


def _work(order: TrialOrder) -> TrialResult:
    if order.prepare_only:
        return _prepare(order)
    return _train(order) if order.topology is None else compile_step(order, order.topology)


def _prepare(order: TrialOrder) -> TrialResult:
    dataset = _dataset(order, read_config(order.config))
    return TrialResult.partial(data_digest=dataset.digest, data_folder=dataset.folder)


def _train(order: TrialOrder) -> TrialResult:
    from model.layers import mamba3
    from model.training import train

    config = read_config(order.config)
    dataset = _dataset(order, config)
    if order.cold_caches:
        start_cold(order.paths.caches)
    keep_kernels(order.data_dir / "kernels")
    mamba3.use_lane(config.model.scan.lane, peer_site())
    device = find_device(order.device_type, config.mesh.devices)
    others = None if order.others is None else partial(yield_to_others, order.others)
    with _StepFile(order.paths.steps) as steps:
        result = train.train(config, dataset=dataset, on_step=steps.append, device=device, yield_to_others=others)
    if order.cold_caches:
        shutil.rmtree(order.paths.caches, ignore_errors=True)
    return TrialResult(
        data_digest=dataset.digest,
        data_folder=dataset.folder,
        **result.model_dump(exclude={"steps"}),
    )


def find_device(device_type: str, devices: int = 1) -> "torch.device":
    """Return the device to train on. Raises DeviceMissing where torch cannot use one: another is no replacement."""
    import torch

    if device_type == "xla":
        return _xla_device(devices)
    if device_type != "cpu" and not torch.get_device_module(device_type).is_available():
        raise DeviceMissing(
            f"this node trains on devices of type '{device_type}', and torch {torch.__version__} finds none"
        )
    return torch.device(device_type)


def _xla_device(devices: int) -> "torch.device":
    from kernels import xla_device

    try:
        if devices > 1:
            xla_device.use_mesh(devices)
        return xla_device.device()
    except (KernelUnsupported, RuntimeError) as error:  # RuntimeError: the runtime finds no chip
        raise DeviceMissing(f"this node trains on XLA, and no device can be used: {error}") from error


def _dataset(order: TrialOrder, config: TrainConfig) -> "Dataset":
    """Open the dataset that was prepared for this trial; without one, or when it was damaged since, prepare it."""
    from model.data.dataset import open_prepared, prepare

    check_corpus(config.data.corpus, order.corpus_roots)
    dataset = None if order.dataset is None else open_prepared(order.dataset)
    if dataset is not None:
        return dataset
    return prepare(config.data, config.model.vocab_size, cache_dir=order.data_dir, report=_say)


class _StepFile:
    """Appends every step to a file as it ends, and says it in the log."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def __enter__(self) -> "_StepFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, step: "Step") -> None:
        """Write one step; a non-finite number is written as it is and judged by the worker."""
        self._file.write(json.dumps(step.model_dump()) + "\n")
        rate = step.tokens / step.seconds if step.seconds else 0.0
        _say(f"step {step.index:4d} {step.phase:<8} loss {step.loss:.4f}  {step.seconds:.3f} s  {rate:,.0f} tokens/s")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MESSAGE_LIMIT]
