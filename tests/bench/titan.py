"""Speed of torchtitan on the dense model that `tests.bench.step` trains with `--pattern` of 17 times AF.

Usage: python -m torch.distributed.run --nproc-per-node N -m tests.bench.titan --out FILE [--rows B] [--tokens S]
[--steps N] [--copies]

torchtitan 0.2.2 is the peer, in an environment of its own, at its fastest settings that train alike: compiled blocks
and loss, no activation checkpointing, cuDNN attention, fused AdamW, parameters in bfloat16 and sums of gradients in
float32. Rows hold random tokens. Rank 0 adds one JSON line: mean step after the first ten, which run on without a wait
for the device, tokens/s of all devices, peak memory, the parameters and the losses of the first and the last step.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torchtitan.config import JobConfig
from torchtitan.models.llama3 import get_train_spec
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer

WARMUP = 10
VOCABULARY = 32_768


class RandomRows:
    """Rows of random tokens, each predicted from the one before."""

    def __init__(self, rows: int, tokens: int, seed: int) -> None:
        self._shape = (rows, tokens + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            row = torch.randint(32_000, self._shape, generator=self._generator)
            yield {"input": row[:, :-1].contiguous()}, row[:, 1:].contiguous()


class TimedTrainer(Trainer):  # type: ignore[misc]
    """Trains, and times all steps after the first ten together."""

    def __init__(self, config: JobConfig) -> None:
        super().__init__(config)
        self.losses: list[torch.Tensor] = []
        self.began = self.seconds = 0.0

    def train_step(self, data_iterator: Any) -> None:
        """Train a step."""
        if self.step == WARMUP + 1:
            torch.cuda.synchronize()
            self.began = time.perf_counter()
        super().train_step(data_iterator)
        if self.step == self.job_config.training.steps:
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.began

    def forward_backward_step(self, **arguments: Any) -> torch.Tensor:
        """Keep the loss, which torchtitan divides by the tokens of all ranks."""
        loss: torch.Tensor = super().forward_backward_step(**arguments)
        self.losses.append(loss.detach())
        return loss


def main() -> None:
    """Train, and write the line."""
    parser = argparse.ArgumentParser(prog="titan", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4, help="of each device")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=30, help=f"the first {WARMUP} do not count")
    parser.add_argument("--copies", action="store_true", help="every device keeps all parameters")
    options = parser.parse_args()
    world = int(os.environ["WORLD_SIZE"])
    spec = get_train_spec()
    spec.model_args = {
        "dense": TransformerModelArgs(
            dim=2048, n_layers=17, n_heads=16, vocab_size=VOCABULARY, multiple_of=4096, ffn_dim_multiplier=0.75
        )
    }
    spec.build_tokenizer_fn = None
    spec.state_dict_adapter = None
    spec.build_dataloader_fn = lambda dp_rank, **_others: RandomRows(options.rows, options.tokens, dp_rank)
    register_train_spec("dense", spec)
    trainer = TimedTrainer(_config(options, world))
    trainer.train()
    seconds = trainer.seconds / (options.steps - WARMUP)
    row = {
        "peer": "torchtitan 0.2.2",
        "device": torch.cuda.get_device_name(),
        "ranks": world,
        "copies": options.copies,
        "rows": options.rows,
        "tokens": options.tokens,
        "step_ms": round(1e3 * seconds, 2),
        "tokens_per_s": round(world * options.rows * options.tokens / seconds),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "parameters_m": round(sum(parameter.numel() for parameter in trainer.model_parts[0].parameters()) / 1e6),
        "loss_first_last": [world * float(trainer.losses[index]) for index in (0, -1)],
    }
    if int(os.environ["RANK"]) == 0:
        with options.out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
        sys.stdout.write(json.dumps(row) + "\n")
    trainer.close()
    torch.distributed.destroy_process_group()


def _config(options: argparse.Namespace, world: int) -> JobConfig:
    config = JobConfig()
    config.model.name, config.model.flavor = "dense", "dense"
    config.training.local_batch_size = options.rows
    config.training.seq_len = options.tokens
    config.training.steps = options.steps
    config.optimizer.implementation = "fused"
    config.optimizer.lr = 3e-4
    config.lr_scheduler.warmup_steps = 5
    config.compile.enable = True
    config.compile.components = ["model", "loss"]
    config.activation_checkpoint.mode = "none"
    config.metrics.log_freq = 1000  # each line waits for the device
    if options.copies:
        config.parallelism.data_parallel_replicate_degree = world
        config.parallelism.data_parallel_shard_degree = 1
    return config


if __name__ == "__main__":
    main()
