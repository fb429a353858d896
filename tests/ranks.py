"""Run a function in several processes of torch.distributed: over gloo on processors, over NCCL on GPUs."""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from ablate.model.config import MeshConfig

LONGEST_S = {"cpu": 120.0, "cuda": 900.0}
"""Seconds of one call. On a GPU the scan's kernels are compiled first."""

_context = multiprocessing.get_context("forkserver")
_server = forkserver.ForkServer()
"""A fork server of the ranks alone: the one of multiprocessing may have been started by a test of workers, without
torch, and every rank would then import that itself, for seconds."""
_server.set_forkserver_preload(["ablate.model.training.ranked_step", "tests.unit.model.test_train"])


def run_ranks(mesh: MeshConfig, work: Callable[..., Any], *arguments: Any, device: str = "cpu") -> list[Any]:
    """Return the values of work(ranks, *arguments) by rank. `work` is a function of a module; values are pickled.

    On `device` cuda each rank has the GPU of its number. Raises RuntimeError with a rank's traceback when it fails; the
    other ranks are ended.
    """
    with TemporaryDirectory(prefix="ranks-") as folder:
        pipes, processes = [], []
        for rank in range(mesh.devices):
            ours, theirs = _context.Pipe(duplex=False)
            job = (rank, mesh, Path(folder) / "meeting", theirs, device, work, arguments)
            process = _context.Process(target=_rank, args=job, daemon=True)
            with patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process):
                process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _values(pipes, LONGEST_S[device])
        finally:
            for process in processes:
                process.kill()
                process.join()


def _values(pipes: list[Connection], longest_s: float) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(pipes):
        ready: list[Any] = wait([pipe for rank, pipe in enumerate(pipes) if rank not in values], longest_s)
        if not ready:
            raise RuntimeError(f"ranks {sorted(set(range(len(pipes))) - set(values))} did not end in {longest_s:.0f} s")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                done, value = pipe.recv()
            except EOFError:
                done, value = False, "it ended without an answer"
            if not done:
                raise RuntimeError(f"rank {rank} of {len(pipes)}: {value}")
            values[rank] = value
    return [values[rank] for rank in range(len(pipes))]


def _rank(
    rank: int,
    mesh: MeshConfig,
    meeting: Path,
    pipe: Connection,
    kind: str,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch

    from ablate.model.parallel.ranks import Ranks, join

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    try:
        if kind == "cuda":
            torch.cuda.set_device(device)
        join(rank, mesh.devices, meeting, device)
        value = work(Ranks(mesh, device), *arguments)
        # pickle copies tensors; pipe.send would share their memory, which ends with this process
        pipe.send_bytes(pickle.dumps((True, value)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
