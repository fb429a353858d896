import pytest
import torch

from model import hybrid
from model.config import HybridConfig, MambaConfig, OptimConfig, TrainConfig
from model.training.optim_step import adamw, decays, learning_rate, set_learning_rate

MAMBA = MambaConfig(d_state=8, headdim=16, mimo_rank=2)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return hybrid.build(TrainConfig(model=HybridConfig(vocab_size=512, d_model=32, pattern="MFA", mamba=MAMBA)))


def test_decays_takes_every_matrix_and_no_vector_norm_or_bias(model: torch.nn.Module) -> None:
    decayed = {name for name, parameter in model.named_parameters() if decays(name, parameter)}
    spared = {name for name, _ in model.named_parameters()} - decayed
    assert {"embedding", "lm_head.weight", "blocks.0.mixer.in_proj.weight", "blocks.0.mixer.psi"} <= decayed
    for leaf in ("dt_bias", "D", "q_bias", "k_bias", "q_norm.weight"):
        assert f"blocks.0.mixer.{leaf}" in spared
    assert {"blocks.0.norm.weight", "final_norm.weight"} <= spared


def test_adamw_holds_every_parameter_once(model: torch.nn.Module) -> None:
    optimizer = adamw(model.named_parameters(), OptimConfig())
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_adamw_shrinks_a_matrix_without_gradient_and_leaves_a_vector_alone() -> None:
    matrix, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,)))
    optimizer = adamw([("m", matrix), ("v", vector)], OptimConfig(learning_rate=0.5, weight_decay=0.1))
    matrix.grad, vector.grad = torch.zeros_like(matrix), torch.zeros_like(vector)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 0.95))
    torch.testing.assert_close(vector.detach(), torch.ones(2))


def test_adamw_leaves_frozen_parameters_out() -> None:
    frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    optimizer = adamw([("m", torch.nn.Parameter(torch.ones(2, 2))), ("frozen", frozen)], OptimConfig())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


@pytest.mark.parametrize(("step", "expected"), [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (1000, 1.0)])
def test_learning_rate_ramps_linearly_then_stays(step: int, expected: float) -> None:
    assert learning_rate(step, OptimConfig(learning_rate=1.0, warmup_steps=4)) == expected


def test_learning_rate_without_warmup_is_full_from_the_first_step() -> None:
    assert learning_rate(0, OptimConfig(learning_rate=0.5, warmup_steps=0)) == 0.5


def test_set_learning_rate_reaches_every_group(model: torch.nn.Module) -> None:
    optimizer = adamw(model.named_parameters(), OptimConfig())
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
