"""Builds the model and fills every parameter from one seed.

Each parameter draws from its own generator, seeded by the run's seed and the parameter's name. So two arms of an
ablation that differ in one block start from the same numbers everywhere else.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from model.config import MambaConfig, TrainConfig
from model.hybrid import Hybrid

EMBEDDING_STD = 0.02

_CONSTANTS = {"q_bias": 1.0, "k_bias": 1.0, "zeta": 1.0, "D": 1.0}
"""Parameters of the mixer that start at a constant; psi and phi start at 1 / R."""


def build(config: TrainConfig) -> Hybrid:
    """Return the initialised model of `config` on the CPU; equal seeds give bit-equal parameters."""
    with torch.device("meta"):
        model = Hybrid(config.model, compute_dtype=getattr(torch, config.dtype))
    model.to_empty(device="cpu")
    initialise(model, seed=config.seed)
    return model


@torch.no_grad()
def initialise(model: Hybrid, *, seed: int) -> None:
    """Fill every parameter of `model` in place.

    Matrices are normal with variance 1 / fan-in, output projections further divided by sqrt(number of blocks), so
    the residual stream does not grow with depth. Embedding and head have standard deviation 0.02: the first loss is
    close to ln(vocabulary).
    """
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("psi", "phi"):
            parameter.fill_(1 / model.config.mamba.mimo_rank)
        elif leaf in _CONSTANTS:
            parameter.fill_(_CONSTANTS[leaf])
        elif leaf == "dt_bias":
            _step_size_bias(parameter, model.config.mamba, _generator(seed, name))
        elif parameter.dim() == 1:
            parameter.fill_(1.0)  # norm weights
        else:
            parameter.normal_(std=_std(name, parameter, len(model.blocks)), generator=_generator(seed, name))


def _std(name: str, weight: nn.Parameter, num_blocks: int) -> float:
    if name in ("embedding", "lm_head.weight"):
        return EMBEDDING_STD
    depth = num_blocks if name.endswith("out_proj.weight") else 1
    return float((weight.shape[1] * depth) ** -0.5)


def _step_size_bias(bias_H: Tensor, mamba: MambaConfig, generator: torch.Generator) -> None:
    """Fill with the inverse softplus of step sizes drawn log-uniformly in [dt_min, dt_max]."""
    bias_H.uniform_(math.log(mamba.dt_min), math.log(mamba.dt_max), generator=generator)
    dt_H = bias_H.exp().clamp_min(mamba.dt_init_floor)
    bias_H.copy_(dt_H + torch.log(-torch.expm1(-dt_H)))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
