"""What the whole process is set to while a trial trains: seed, determinism, threads, garbage collection."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic

from model.config import TrainConfig


@contextmanager
def reproducible(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Seed torch, choose deterministic kernels and the thread count; put the settings back afterwards."""
    threads = torch.get_num_threads()
    fill = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    enabled = torch.are_deterministic_algorithms_enabled()
    if device.type == "cuda":
        # cuBLAS reads it when its handle is made; torch refuses deterministic mode without it.
        os.putenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor with NaN finds bugs, and would be measured here as the model's time.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled)
        deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.set_num_threads(threads)


@contextmanager
def no_automatic_gc() -> Iterator[None]:
    """Collect garbage now and not again until the end of the block; a step leaves no reference cycles behind."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
