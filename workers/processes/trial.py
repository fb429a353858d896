"""The trainer's side of a trial: a fresh process, forked from a server that has torch imported.

This module imports torch only inside functions, because the worker itself imports it, too, and needs no torch.
"""

import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from experiments.design.config_fields import read_config
from experiments.design.program import is_program
from experiments.documents import write_whole
from experiments.runtime.processes import adopt_orphans, die_with_parent
from kernels.errors import KernelUnsupported
from model.data.corpus import TORCH_HEADERS
from model.errors import DataError, DatasetDamaged
from workers.devices.device_lock import TRAINER_PATIENCE_S, DeviceLock
from workers.environment_variables import keep_kernels, mark_process, peer_site, start_cold, use_environment
from workers.errors import DeviceMissing, OutputTooLarge
from workers.lease import boot_time_s
from workers.paths import is_allowed
from workers.processes.code_copy import copy_code
from workers.processes.compile_trial import compile_step
from workers.processes.failures import CANNOT_WRITE, TOO_LATE, classify
from workers.processes.program import run_program
from workers.processes.result import TrialOrder, TrialResult

if TYPE_CHECKING:
    import torch

    from model.measurements import Step

_MESSAGE_LIMIT = 2000  # characters

MAX_FILE_BYTES = 2 * 2**30
"""Largest file that a trial may write, its log included."""

PIPE_BYTE = b"."
"""Every message between a worker and a trainer that runs in slices. It has no length, on whose rest a reader waits."""


def check_corpus(corpus: str, roots: Sequence[Path] | None) -> None:
    """Raise DataError unless `corpus`, links and `..` resolved, is below one of `roots`; None allows any folder.

    Files below it need no check of their own, because a corpus leaves links out (model/data/corpus.py).
    """
    if corpus == TORCH_HEADERS or is_allowed(Path(corpus), roots):
        return
    allowed = "".join(f", or a folder below {root}" for root in roots or ())
    raise DataError(
        f"corpus {corpus!r} is outside of the folders that this node's operator allows; allowed: '{TORCH_HEADERS}'"
        f"{allowed} (ABLATE_CORPUS_DIRS)"
    )


def main(order: TrialOrder) -> None:
    """Run one trial and write its result file; exit with `CANNOT_WRITE` when that fails."""
    try:
        _run(order)
    except OSError:
        os._exit(CANNOT_WRITE)


def _run(order: TrialOrder) -> None:
    """Write the result file of a trial. It contains the class of any exception from its work."""
    _detach(order)
    _limit_files(None if order.prepare_only else MAX_FILE_BYTES)  # a dataset may be large
    target = order.paths.prepared if order.prepare_only else order.paths.result
    lock = DeviceLock(order.locks)  # released by the end of this process
    try:
        lock.take(patience_s=TRAINER_PATIENCE_S)
        if order.isolation is not None:
            order.isolation.enter()  # after the locks, which are sockets
        use_environment(order.environment)
        result = _work(order)
    except Exception as error:  # the task boundary: the result file records it
        _limit_files(None)  # the traceback and the result still have to be written
        traceback.print_exc()
        cause = _too_large(error)
        result = TrialResult.partial(
            failure_class=classify(cause), message=_printable(f"{type(cause).__name__}: {cause}")[:_MESSAGE_LIMIT]
        )
    sys.stdout.flush()
    sys.stderr.flush()
    write_whole(target, result.model_dump_json())


def _limit_files(most_bytes: int | None) -> None:
    """Limit the size of every file that this process and its children write; None for no limit of our own."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = [limit for limit in (most_bytes, hard) if limit not in (None, resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (min(limits, default=resource.RLIM_INFINITY), hard))


def _too_large(error: Exception) -> Exception:
    """Return an error that names the limit if `error` is about a file beyond it."""
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return OutputTooLarge(f"the trial wrote more than {MAX_FILE_BYTES / 2**30:g} GiB to one file, such as its log")
    return error


def _printable(text: str) -> str:
    """Return text without the halves of characters that stand for undecodable bytes of file names."""
    return text.encode("utf-8", "backslashreplace").decode()


def _detach(order: TrialOrder) -> None:
    """Start an own session and group, die with the parent, write output to the trial's log, read no input."""
    os.setsid()
    _die_with_the_worker()
    adopt_orphans()
    if boot_time_s() > order.start_by:
        os._exit(TOO_LATE)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the fork server's handler ends all trials
    mark_process(order.trial_id)
    _offer_to_oom_killer()
    log = os.open(order.paths.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    empty = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((empty, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(empty)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _offer_to_oom_killer() -> None:
    """Let the kernel end this trial rather than the worker or the service when memory runs out."""
    with suppress(OSError):  # a system without the file ends the process that uses most
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _die_with_the_worker() -> None:
    """End with the fork server, which ends with the worker; end at once if either is already gone.

    A server that lost its worker while it imported torch still starts the trial that was ordered before.
    """
    preload = sys.modules.get("workers.processes.preload")  # inherited; missing if the server failed to import it
    die_with_parent(parent=None if preload is None else preload.SERVER_PID)
    worker = multiprocessing.parent_process()
    if worker is not None and not worker.is_alive():
        os._exit(1)


def _work(order: TrialOrder) -> TrialResult:
    if is_program(order.config):
        return copy_code(order) if order.prepare_only else run_program(order)
    if order.prepare_only:
        return _prepare(order)
    return _train(order) if order.topology is None else compile_step(order, order.topology)


def _prepare(order: TrialOrder) -> TrialResult:
    from model.data.dataset import prepare

    config = read_config(order.config)
    check_corpus(config.data.corpus, order.corpus_roots)
    dataset = prepare(config.data, config.model.vocab_size, cache_dir=order.data_dir, report=_log_preparation)
    return TrialResult.partial(data_digest=dataset.digest, data_folder=dataset.folder)


def _train(order: TrialOrder) -> TrialResult:
    from model.data.dataset import open_prepared
    from model.layers import mamba3
    from model.training import train

    config = read_config(order.config)
    if order.dataset is None:
        raise DatasetDamaged("no dataset was prepared for this trial")
    dataset = open_prepared(order.dataset)
    if order.cold_caches:
        start_cold(order.paths.caches)
    elif order.kernels is not None:
        keep_kernels(order.kernels, order.caches)
    mamba3.use_lane(config.model.scan.lane, peer_site())
    device = find_device(order.device_type, config.mesh.devices)
    wait = None if order.slice_pipe is None else partial(yield_to_others, order.slice_pipe)
    with order.paths.steps.open("w", buffering=1, encoding="utf-8") as steps:
        result = train.train(
            config, dataset=dataset, on_step=partial(_write_step, steps), device=device, yield_to_others=wait
        )
    if order.cold_caches:
        shutil.rmtree(order.paths.caches, ignore_errors=True)
    return TrialResult(
        data_digest=dataset.digest,
        data_folder=dataset.folder,
        **result.model_dump(exclude={"steps"}),
    )


def find_device(device_type: str, devices: int = 1) -> "torch.device":
    """Return the device to train on. Raises DeviceMissing if torch cannot use it: no other device replaces it."""
    import torch

    if device_type == "xla":
        return _xla_device(devices)
    if device_type != "cpu" and not torch.get_device_module(device_type).is_available():
        raise DeviceMissing(
            f"this node trains on devices of type '{device_type}', but torch {torch.__version__} finds none"
        )
    return torch.device(device_type)


def _xla_device(devices: int) -> "torch.device":
    from kernels import xla_device

    try:
        if devices > 1:
            xla_device.use_mesh(devices)
        return xla_device.device()
    except (KernelUnsupported, RuntimeError) as error:  # RuntimeError: the runtime finds no chip
        raise DeviceMissing(f"this node trains on XLA, but no device is usable: {error}") from error


def yield_to_others(worker: Connection) -> None:
    """Report that this trainer waits, and block until the worker lets it go on; exit when the worker is gone."""
    try:
        os.write(worker.fileno(), PIPE_BYTE)
        go_on = os.read(worker.fileno(), 1)
    except OSError:
        go_on = b""
    if not go_on:
        os._exit(TOO_LATE)


def _write_step(file: TextIO, step: "Step") -> None:
    """Append a step to its file and to the log. The worker judges a non-finite number."""
    file.write(json.dumps(step.model_dump()) + "\n")
    rate = step.tokens / step.seconds if step.seconds else 0.0
    _log(f"step {step.index:4d} {step.phase:<8} loss {step.loss:.4f}  {step.seconds:.3f} s  {rate:,.0f} tokens/s")


def _log_preparation(line: str) -> None:
    _log(f"preparation of the data: {line}")


def _log(line: str) -> None:
    sys.stdout.write(line + "\n")
