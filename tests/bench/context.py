"""`python -m tests.bench.context`: what dividing rows over ranks costs, against whole rows on one device.

Usage: python -m tests.bench.context [--device cpu|cuda] [--recipe R] [--attention A] [--ranks C] [--rows B]
[--tokens S]... [--documents MEAN] [--passes N]

For each S, forward and backward passes over B rows of S random tokens, in documents of MEAN tokens on average, run
    whole     on one device
    apart     on C devices, each on its pieces as if they were rows of their own
    together  on C devices that exchange states and keys (model/parallel/context.py)
One JSON line each: the median pass of the slowest rank, the milliseconds that each rank waits for messages in a pass,
and the most bytes in tensors on a device. `together` minus `apart` is the price of the exchange. Gradients of
parameters are not added up. On GPUs over NCCL, otherwise over gloo with one thread per rank. Before it measures
`together`, the command compares every gradient on shorter rows with one device, and fails above MOST_ERROR.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ablate.experiments.design.recipes import RECIPES
from ablate.model.config import CONTEXT_ATTENTION, MeshConfig, TrainConfig, check_context_parallel
from ablate.model.data.packing import Batch
from ablate.model.hybrid import Hybrid, build
from ablate.model.parallel.context import PieceExchange, row_piece, spread_rows
from ablate.model.parallel.ranks import Ranks
from ablate.model.training.loss import cross_entropy
from ablate.model.training.measurement import PeakMeter
from ablate.model.training.optim_step import DeviceBatch, to_device
from tests.ranks import run_ranks

MOST_ERROR = {"float32": 1e-4, "bfloat16": 0.1}
"""By dtype, relative to the norm of the gradient. In bfloat16 whole rows are themselves off by some percent."""
CHECKED_TOKENS = 2048
"""Most tokens of a row for the comparison."""


def main() -> None:
    """Measure each length and print three lines."""
    parser = argparse.ArgumentParser(prog="context", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="hybrid-tiny")
    parser.add_argument("--attention", choices=CONTEXT_ATTENTION, help="default: the recipe's")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, action="append", help="of a whole row; may be repeated; default: 4096")
    parser.add_argument("--documents", type=int, default=1024, help="mean tokens of a document")
    parser.add_argument("--passes", type=int, default=5)
    options = parser.parse_args()
    for tokens in options.tokens or [4096]:
        config = replace(RECIPES[options.recipe].config, micro_batch=options.rows)
        attention = replace(config.model.attention, backend=options.attention or config.model.attention.backend)
        config = replace(config, model=replace(config.model, attention=attention), loss="chunked")
        config = replace(config, data=replace(config.data, seq_len=tokens), loss_chunk_tokens=2048)
        shared = replace(config, mesh=MeshConfig(devices=options.ranks, context=options.ranks))
        check_context_parallel(shared)
        for kind, settings in (("whole", config), ("apart", shared), ("together", shared)):
            measured = _measured(kind, settings, options)
            line = {"rows": options.rows, "tokens": tokens, "documents": options.documents, "kind": kind, **measured}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


def _measured(kind: str, config: TrainConfig, options: argparse.Namespace) -> dict[str, Any]:
    arguments = (config, kind == "together", options.documents, options.passes)
    by_rank = run_ranks(config.mesh, passes, *arguments, device=options.device)
    slowest = [max(seconds) for seconds in zip(*(rank["seconds"] for rank in by_rank), strict=True)]
    return {
        "device": by_rank[0]["device"],
        "ranks": len(by_rank),
        "pass_ms": round(1e3 * statistics.median(slowest), 2),
        "tokens_per_s": round(config.tokens_per_step / statistics.median(slowest)),
        "waited_ms": [round(1e3 * statistics.median(rank["waited"]), 2) for rank in by_rank],
        "peak_mib": [round(rank["peak"] / 2**20, 1) for rank in by_rank],
        "error": float(f"{max(rank['error'] for rank in by_rank):.2g}"),
    }


def passes(ranks: Ranks, config: TrainConfig, exchange: bool, documents: int, repeats: int) -> dict[str, Any]:
    """Return this rank's seconds and waiting seconds of each pass, its peak of bytes in tensors, and its error."""
    device = ranks.device
    error = _error(ranks, config, documents) if exchange else 0.0
    if error > MOST_ERROR[config.dtype]:
        raise ValueError(f"a gradient differs from one device by {error:.2g}; allowed: {MOST_ERROR[config.dtype]}")
    meter = PeakMeter(device)
    model = build(config).to(device)
    if exchange:
        spread_rows(model, ranks)
    waits = _Waits(device)
    batch = to_device(row_piece(_batch(config, documents), ranks.context), device)
    seconds, waited = [], []
    for _ in range(repeats + 1):
        ranks.agree(0)
        waits.clear()
        start = time.perf_counter()
        _pass(model, config, batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
        waited.append(waits.seconds())
    state_bytes = sum(parameter.nbytes for parameter in model.parameters())
    peak = meter.read(lambda: _pass(model, config, batch), state_bytes=state_bytes).allocated_bytes
    ranks.agree(0)  # the last messages have arrived
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "seconds": seconds[1:], "waited": waited[1:], "peak": peak, "error": error}


def _error(ranks: Ranks, config: TrainConfig, documents: int) -> float:
    """Return the largest error of a gradient of pieces against whole rows of at most CHECKED_TOKENS tokens."""
    config = replace(config, data=replace(config.data, seq_len=min(CHECKED_TOKENS, config.data.seq_len)))
    model, batch = build(config).to(ranks.device), _batch(config, documents)
    _backward(model, config, to_device(batch, ranks.device))
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    spread_rows(model, ranks)
    _backward(model, config, to_device(row_piece(batch, ranks.context), ranks.device))
    errors = []
    for parameter, whole in zip(model.parameters(), expected, strict=True):
        if parameter.grad is None or whole is None:
            raise ValueError("a parameter has no gradient")
        mean = ranks.context.sum(parameter.grad) / ranks.context.size  # all pieces have as many valid targets
        errors.append(float((mean - whole).norm() / whole.norm().clamp_min(1e-30)))
    return max(errors)


def _pass(model: Hybrid, config: TrainConfig, batch: DeviceBatch) -> None:
    # new ids, as in every batch, so that the ids of all pieces are gathered again
    _backward(model, config, batch._replace(segment_ids=batch.segment_ids.clone()))
    model.zero_grad(set_to_none=True)


def _backward(model: Hybrid, config: TrainConfig, batch: DeviceBatch) -> None:
    hidden = model(batch.tokens, batch.segment_ids)
    loss: Tensor = cross_entropy(
        hidden, model.lm_head.weight, batch.targets, batch.valid, config.loss, config.loss_chunk_tokens
    )
    loss.backward()  # type: ignore[no-untyped-call]


def _batch(config: TrainConfig, mean: int) -> Batch:
    """Return random rows whose documents have exponentially distributed lengths."""
    generator = np.random.default_rng(config.seed)
    size = (config.micro_batch, config.data.seq_len)
    tokens = generator.integers(0, config.model.vocab_size, (size[0], size[1] + 1))
    ids = (generator.random(size) < 1 / mean).cumsum(1)
    return Batch(tokens[:, :-1], tokens[:, 1:], ids, np.ones(size, dtype=np.bool_))


class _Waits:
    """Time in `PieceExchange.receive`, on a GPU that of its stream."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._times: list[tuple[Any, Any]] = []
        receive: Callable[[PieceExchange, Tensor, int], Tensor] = PieceExchange.receive

        def timed(exchange: PieceExchange, tensor: Tensor, source: int) -> Tensor:
            start = self._now()
            receive(exchange, tensor, source)
            self._times.append((start, self._now()))
            return tensor

        PieceExchange.receive = timed  # type: ignore[method-assign]

    def clear(self) -> None:
        """Forget earlier waits."""
        self._times.clear()

    def seconds(self) -> float:
        """Return the sum of the waits. On a GPU it has to be synchronised before."""
        if self._on_gpu:
            return sum(start.elapsed_time(end) for start, end in self._times) / 1e3
        return float(sum(end - start for start, end in self._times))

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


if __name__ == "__main__":
    main()
