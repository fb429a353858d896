"""Where the time of a training step goes on this GPU, for one set of gates after another.

Usage: python -m tests.bench.step --out FILE [--set gate=value,gate=value]... [--recipe NAME] [--pattern P] [--rows B]
[--tokens S] [--documents MEAN] [--steps N] [--ranks N]

With --ranks every set is trained by N processes, each on the GPU of its number, with `--rows` rows for each device that
has rows of its own; otherwise by this process.

The model has width 2048 and 64 value heads; without a pattern it is the hybrid of 841 million parameters. `--recipe`
trains a recipe as it is. Rows hold random tokens in documents of MEAN tokens on average. Each set is trained by the
trainer of a trial. One JSON line per set: median step, tokens/s of all devices, peak memory of one, the seconds from
the start of the processes to the end of the first step, the milliseconds of a profiled step by group of kernels, and
loss and gradient norm of every step.
"""

import argparse
import gc
import json
import re
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from ablate.experiments.design.gates import with_gates
from ablate.experiments.design.recipes import RECIPES
from ablate.experiments.design.spec_values import gate_refusal
from ablate.kernels.errors import KernelError
from ablate.model import counts
from ablate.model.config import MeshConfig, StepsConfig, TrainConfig
from ablate.model.data.dataset import Dataset
from ablate.model.data.packing import PackedRows
from ablate.model.errors import ConfigError
from ablate.model.parallel.ranks import Ranks
from ablate.model.training.profiled import ATTENTION_KERNELS
from ablate.model.training.train import TrainResult, train
from ablate.workers.built_in.training import profile_step
from tests.ranks import run_ranks

HYBRID = "MFMFMFAFMFMFMF" * 2
_ATTENTION = "|".join(pattern for pair in ATTENTION_KERNELS.values() for pattern in pair) + "|flash_attncute|flash_bwd"
GROUPS = {
    "attention": _ATTENTION,
    "optimiser": r"FusedAdam|FusedOptimizer|LpNorm|lpnorm|multi_tensor_apply|foreach",
    "loss": r"nll_loss|[sS]oft[mM]ax|cross_entropy",
    "matrix products": r"nvjet|gemm|cublas|splitKreduce|_scaled_mm",
    "copies": r"Memcpy|Memset",
}
"""Group -> pattern of the names of its kernels, the first that fits. The scan's kernels are those of the trial's
facts; everything else is elementwise."""


def main() -> None:
    """Train each set and print a line."""
    parser = argparse.ArgumentParser(prog="step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], help="gates as gate=value,gate=value; may be repeated")
    parser.add_argument("--recipe", choices=[*RECIPES], help="train this recipe in place of the hybrid of 841 million")
    parser.add_argument("--pattern", help="blocks in place of the model's")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=1024, help="mean tokens of a document")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    if torch.cuda.device_count() < options.ranks:
        parser.error(f"needs {options.ranks} GPU(s); this machine has {torch.cuda.device_count()}")
    try:
        sets = [(gates, _config(options, gates)) for gates in options.set or [""]]
    except ConfigError as error:
        parser.error(str(error))
    num_rows = options.rows * options.ranks * (options.steps + 4)
    dataset = _rows_of_random_tokens(num_rows, options.tokens, options.documents)
    for gates, config in sets:
        began = time.monotonic()
        row: dict[str, Any] = {"gates": gates, "pattern": config.model.pattern, "rows": options.rows}
        row |= {"tokens": options.tokens, "documents": options.documents, "ranks": options.ranks}
        try:
            if options.ranks > 1:
                row |= run_ranks(config.mesh, _trained_by_ranks, config, dataset, device="cuda")[0]
            else:
                row |= _trained(config, dataset)
        except (KernelError, RuntimeError, AssertionError) as error:
            row |= {"error": f"{type(error).__name__}: {error}"[:600], "where": traceback.format_exc()[-1500:]}
        row["seconds"] = round(time.monotonic() - began, 1)
        if "first_step_at" in row:  # by the same clock in every process of the machine
            row["first_step_s"] = round(row.pop("first_step_at") - began, 1)
        gc.collect()
        torch.cuda.empty_cache()
        line = json.dumps(row)
        with options.out.open("a", encoding="utf-8") as lines:
            lines.write(line + "\n")
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _config(options: argparse.Namespace, gates: str) -> TrainConfig:
    config = RECIPES[options.recipe or "hybrid-ref-h200"].config
    model = config.model
    if options.recipe is None:
        model = replace(model, d_model=2048, pattern=HYBRID, attention=replace(model.attention, num_heads=16))
    config = replace(
        config,
        model=replace(model, pattern=options.pattern or model.pattern),
        data=replace(config.data, seq_len=options.tokens),
        steps=StepsConfig(warmup=3, timed=options.steps, val_rows=0),
        micro_batch=options.rows * options.ranks,  # before the gates divide rows or layers
        mesh=MeshConfig(devices=options.ranks),
    )
    settings = (setting.partition("=") for setting in gates.split(",") if setting)
    values = {name: yaml.safe_load(value) for name, _, value in settings}
    for name, value in values.items():
        refusal = gate_refusal(name, value)
        if refusal is not None:
            raise ConfigError("--set", refusal[0])
    config = with_gates(config, values)
    return replace(config, micro_batch=options.rows * config.mesh.data)


def _rows_of_random_tokens(num_rows: int, length: int, mean: int) -> Dataset:
    """Return a dataset of `num_rows` rows whose documents have exponentially distributed lengths."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 32_000, (num_rows, length + 1), dtype=np.uint16)
    ends = generator.random((num_rows, length + 1)) < 1 / mean
    rows = PackedRows(tokens=tokens, doc_ids=ends.cumsum(dtype=np.int32).reshape(ends.shape))
    nothing = {"second": None, "val_digest": "", "digest": "", "folder": Path()}
    return Dataset(seq_len=length, val_row=length, vocab_size=32_000, train=rows, val=rows, **nothing)


def _trained_by_ranks(ranks: Ranks, config: TrainConfig, dataset: Dataset) -> dict[str, Any]:
    return _trained(config, dataset, ranks)


def _trained(config: TrainConfig, dataset: Dataset, ranks: Ranks | None = None) -> dict[str, Any]:
    profile = partial(profile_step, traced=False)
    result = train(
        config,
        dataset=dataset,
        on_step=lambda _step: None,
        profile=profile,
        ranks=ranks,
        device=None if ranks is None else ranks.device,
    )
    seconds = statistics.median(step.seconds for step in result.steps if step.phase == "timed")
    exchanges = ("communication_s", "exposed_communication_s", "communication_bytes")
    return {
        "device": torch.cuda.get_device_name(),
        "first_step_at": (result.training_began_s or 0.0) + result.steps[0].ended_s,
        **{name: value for name in exchanges if (value := getattr(result, name)) is not None},
        "step_ms": round(1e3 * seconds, 2),
        "tokens_per_s": round(config.tokens_per_step / seconds),
        "peak_gib": round(result.peak_allocated_bytes / 2**30, 2),
        "parameters_m": round(result.parameters / 1e6),
        "active_parameters_m": round(counts.active_parameters(config.model) / 1e6),
        "model_tflop": round(counts.step_flops(config) / 1e12, 2),
        "model_tflop_per_s_and_gpu": round(counts.step_flops(config) / seconds / 1e12 / config.mesh.devices, 1),
        "useful_tflop_per_s_and_gpu": round(
            (result.document_flops_per_step or 0.0) / seconds / 1e12 / config.mesh.devices, 1
        ),
        "losses": [step.loss for step in result.steps],
        "grad_norms": [step.grad_norm for step in result.steps],
        "compile_s": round(result.compile_s, 1),
        "facts": {name: value for name, value in result.facts.items() if not name.startswith("scan.")},
        "groups_ms": dict(_grouped(result)),
        "largest": sorted(_others(result), key=lambda row: -row[2])[:24],
    }


def _grouped(result: TrainResult) -> Iterator[tuple[str, float]]:
    sums: Counter[str] = Counter()
    for name, _, microseconds in result.step_kernels or ():
        sums[_group(name, result)] += microseconds  # type: ignore[assignment]
    yield from ((group, round(sums[group] / 1e3, 2)) for group in sorted(sums))


def _others(result: TrainResult) -> Iterator[tuple[str, int, float]]:
    for name, calls, microseconds in result.step_kernels or ():
        if _group(name, result) != "scan":
            yield name[:150], calls, microseconds


def _group(name: str, result: TrainResult) -> str:
    if any(re.match(rf"(\w\d_)?{re.escape(str(row['name']))}_kernel", name) for row in result.kernels):
        return "scan"
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), "elementwise")


if __name__ == "__main__":
    main()
