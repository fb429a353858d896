"""The count of parameters against torch's own modules, for drawn configurations and for every recipe."""

import random
from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from ablate.experiments.design.recipes import RECIPES
from ablate.model.block_configs import HeadNorm
from ablate.model.config import (
    BLOCK_KINDS,
    AttentionConfig,
    ExpertsConfig,
    HybridConfig,
    MambaConfig,
    NormKind,
    RecurrenceConfig,
)
from ablate.model.counts import num_parameters
from ablate.model.hybrid import Hybrid


def in_torch(model: HybridConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Hybrid(model).parameters())


def drawn(count: int) -> Iterator[HybridConfig]:
    chance = random.Random(20261123)  # noqa: S311 - draws for a test
    for _ in range(count):
        groups = chance.choice((1, 2, 4))
        yield HybridConfig(
            vocab_size=chance.randint(257, 4096),
            d_model=64 * chance.randint(1, 4),
            pattern="".join(chance.choices(list(BLOCK_KINDS), k=chance.randint(1, 6))),
            mlp_ratio=chance.uniform(0.5, 8.0),
            experts=ExpertsConfig(
                num_experts=chance.randint(2, 9),
                top_k=chance.randint(1, 2),
                width=chance.randint(8, 99),
                shared_width=chance.choice((0, 8, 31)),
            ),
            recurrence=RecurrenceConfig(
                num_heads=chance.randint(1, 5),
                key_width=chance.randint(1, 20),
                value_width=chance.randint(1, 20),
                conv_width=chance.randint(1, 5),
            ),
            norm=chance.choice(get_args(NormKind)),
            mamba=MambaConfig(
                d_state=4 * chance.randint(2, 64),
                expand=chance.randint(1, 4),
                headdim=chance.choice((8, 16)),
                ngroups=groups,
                mimo_rank=chance.choice((1, 2, 4, 8)),
                rope_fraction=chance.choice((0.5, 1.0)),
            ),
            attention=AttentionConfig(
                num_heads=chance.choice((2, 4)),
                **chance.choice(
                    (
                        {"num_kv_heads": chance.choice((0, 1, 2)), "qk_norm": chance.choice(get_args(HeadNorm))},
                        {"latent_rank": chance.randint(1, 70)},
                    )
                ),
            ),
        )


def test_drawn_models_have_as_many_parameters_as_torch_counts() -> None:
    for model in drawn(100):
        assert num_parameters(model) == in_torch(model), model


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_have_as_many_parameters_as_torch_counts(name: str) -> None:
    assert num_parameters(RECIPES[name].config.model) == in_torch(RECIPES[name].config.model)
