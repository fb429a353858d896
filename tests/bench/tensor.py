"""`python -m tests.bench.tensor`: what dividing layers over ranks costs and saves, against whole layers on one device.

Usage: python -m tests.bench.tensor [--device cpu|cuda] [--recipe R] [--lane L] [--attention A] [--ranks T]...
[--rows B] [--tokens S] [--documents MEAN] [--passes N]

Forward and backward passes over B rows of S random tokens, in documents of MEAN tokens on average, run with whole
layers on one device and with layers divided over T devices (model/parallel/tensor.py). One JSON line each: the median
pass of the slowest rank, the milliseconds of a pass in sums over ranks, the most bytes in tensors on a device, and the
largest error of a gradient against one device, relative to the norm of the gradient. If that is above MOST_ERROR, the
command fails before it prints a time. On GPUs over NCCL, otherwise over gloo with one thread per rank.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from experiments.design.recipes import RECIPES
from kernels.backends import Lane
from model.config import MeshConfig, TrainConfig, check_tensor_parallel
from model.data.packing import Batch
from model.hybrid import Hybrid, build
from model.parallel.ranks import Group, Ranks
from model.parallel.tensor import divide_layers
from model.training.loss import cross_entropy
from model.training.measurement import PeakMeter
from model.training.optim_step import DeviceBatch, to_device
from tests.ranks import run_ranks

MOST_ERROR = {"float32": 1e-4, "bfloat16": 0.1}
"""By dtype. With bfloat16 a gradient of one device is itself off by some percent."""


def main() -> None:
    """Measure one device and each number of ranks."""
    parser = argparse.ArgumentParser(prog="tensor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="hybrid-tiny")
    parser.add_argument("--lane", choices=("reference", "cuda"), default="reference")
    parser.add_argument("--attention", choices=("sdpa", "flash", "fa4"), default="sdpa")
    parser.add_argument("--ranks", type=int, action="append", help="may be repeated; default: 2")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="of a row")
    parser.add_argument("--documents", type=int, default=256, help="mean tokens of a document")
    parser.add_argument("--passes", type=int, default=5)
    options = parser.parse_args()
    config = replace(RECIPES[options.recipe].config, micro_batch=options.rows, loss="chunked", loss_chunk_tokens=2048)
    scan = replace(config.model.scan, lane=Lane(options.lane))
    attention = replace(config.model.attention, backend=options.attention)
    model, data = replace(config.model, scan=scan, attention=attention), replace(config.data, seq_len=options.tokens)
    config = replace(config, model=model, data=data)
    for ranks in (1, *(options.ranks or [2])):
        shared = replace(config, mesh=MeshConfig(devices=ranks, tensor=ranks))
        check_tensor_parallel(shared)
        by_rank = run_ranks(shared.mesh, passes, shared, options.documents, options.passes, device=options.device)
        slowest = statistics.median(
            max(seconds) for seconds in zip(*(rank["seconds"] for rank in by_rank), strict=True)
        )
        line = {
            "device": by_rank[0]["device"],
            "recipe": options.recipe,
            "ranks": ranks,
            "pass_ms": round(1e3 * slowest, 2),
            "tokens_per_s": round(shared.tokens_per_step / slowest),
            "in_sums_ms": [round(1e3 * statistics.median(rank["in_sums"]), 2) for rank in by_rank],
            "parameters_m": round(by_rank[0]["parameters"] / 1e6, 1),
            "peak_mib": [round(rank["peak"] / 2**20, 1) for rank in by_rank],
            "error": float(f"{max(rank['error'] for rank in by_rank):.2g}"),
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def passes(ranks: Ranks, config: TrainConfig, documents: int, repeats: int) -> dict[str, Any]:
    """Return this rank's seconds, in all and in sums over ranks, of each pass, its peak of bytes, and its error."""
    meter = PeakMeter(ranks.device)
    batch = _batch(config, documents, ranks.device)
    expected = _slices_of_gradients(config, ranks, batch)
    model = build(config)
    divide_layers(model, ranks)
    model.to(ranks.device)
    _pass(model, config, batch, ranks.tensor)
    error = max(_error(p.grad, expected[name]) for name, p in model.named_parameters())
    if error > MOST_ERROR[config.dtype]:
        raise ValueError(f"a gradient differs from one device by {error:.2g}; allowed: {MOST_ERROR[config.dtype]}")
    del expected
    sums, seconds, in_sums = _Sums(ranks.device), [], []
    for _ in range(repeats + 1):
        model.zero_grad(set_to_none=True)
        ranks.agree(0)
        sums.clear()
        start = time.perf_counter()
        _pass(model, config, batch, ranks.tensor)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        seconds.append(time.perf_counter() - start)
        in_sums.append(sums.seconds())
    model.zero_grad(set_to_none=True)
    state_bytes = sum(parameter.nbytes for parameter in model.parameters())
    peak = meter.read(lambda: _pass(model, config, batch, ranks.tensor), state_bytes=state_bytes)
    return {
        "device": torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu",
        "seconds": seconds[1:],
        "in_sums": in_sums[1:],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "peak": peak.allocated_bytes,
        "error": error,
    }


def _slices_of_gradients(config: TrainConfig, ranks: Ranks, batch: DeviceBatch) -> dict[str, Tensor]:
    """Return this rank's share of one device's gradients, by the name of the parameter."""
    whole = build(config).to(ranks.device)
    _pass(whole, config, batch, None)
    gradients = copy.deepcopy(whole)
    with torch.no_grad():
        for parameter, source in zip(gradients.parameters(), whole.parameters(), strict=True):
            parameter.copy_(cast(Tensor, source.grad))
    divide_layers(gradients, ranks)  # a model whose parameters are gradients
    return {name: parameter.detach() for name, parameter in gradients.named_parameters()}


def _error(actual: Tensor | None, expected: Tensor) -> float:
    return float((cast(Tensor, actual) - expected).norm() / expected.norm().clamp_min(1e-30))


def _pass(model: Hybrid, config: TrainConfig, batch: DeviceBatch, group: Group | None) -> None:
    hidden = model(batch.tokens, batch.segment_ids)
    rest = (batch.targets, batch.valid, config.loss, config.loss_chunk_tokens)
    cross_entropy(hidden, model.lm_head.weight, *rest, vocabulary=group).backward()  # type: ignore[no-untyped-call]


def _batch(config: TrainConfig, mean: int, device: torch.device) -> DeviceBatch:
    """Return random rows whose documents have exponentially distributed lengths."""
    generator = np.random.default_rng(config.seed)
    size = (config.micro_batch, config.data.seq_len)
    tokens, targets = (generator.integers(0, config.model.vocab_size, size) for _ in range(2))
    ids = (generator.random(size) < 1 / mean).cumsum(1)
    return to_device(Batch(tokens, targets, ids, np.ones(size, dtype=np.bool_)), device)


class _Sums:
    """Time in `Group.sum`, on a GPU that of its stream."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._times: list[tuple[Any, Any]] = []
        add_up = Group.sum

        def timed(group: Group, tensor: Tensor) -> Tensor:
            start = self._now()
            add_up(group, tensor)
            self._times.append((start, self._now()))
            return tensor

        Group.sum = timed  # type: ignore[assignment, method-assign]

    def clear(self) -> None:
        """Forget earlier sums."""
        self._times.clear()

    def seconds(self) -> float:
        """Return the time of all sums. On a GPU it has to be synchronised before."""
        if self._on_gpu:
            return float(sum(start.elapsed_time(end) for start, end in self._times) / 1e3)
        return float(sum(end - start for start, end in self._times))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


if __name__ == "__main__":
    main()
