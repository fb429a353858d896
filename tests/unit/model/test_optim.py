import pytest
import torch

from ablate.kernels import facts
from ablate.model import hybrid
from ablate.model.config import AdamWUpdate, HybridConfig, MambaConfig, OptimConfig, TrainConfig
from ablate.model.errors import ConfigError
from ablate.model.facts import ModelFact
from ablate.model.training.optim_step import learning_rate, set_learning_rate, update
from ablate.model.training.optimizers import MuonAndAdamW, adamw, decays

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


@pytest.mark.parametrize("limit", [0.01, 1.0, 1e6])
def test_clipping_inside_the_update_equals_clipping_before_it(limit: float) -> None:
    generator = torch.Generator().manual_seed(5)
    shapes = ((3, 4), (7,), (2, 2, 2))
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    inputs = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(4)]
    results = []
    for kind in ("fused", "clip_in_update", "foreach"):
        config = TrainConfig(optim=OptimConfig(update=kind, grad_clip=limit))
        parameters = [torch.nn.Parameter(tensor.clone()) for tensor in start]
        optimizer = adamw([(f"m{place}", p) for place, p in enumerate(parameters)], config.optim)
        norms = []
        for row in inputs:
            loss = torch.stack([(p * x).sum() for p, x in zip(parameters, row, strict=True)]).sum()
            with facts.collect() as seen:
                norms.append(update(loss, parameters, optimizer, config)[1].item())
        update_facts = {ModelFact.ADAMW_UPDATE: kind, ModelFact.ADAMW_MOMENTS: "float32"}
        assert seen == {ModelFact.OPTIMIZER: "adamw", **update_facts}
        results.append((norms, parameters))
    for norms, parameters in results[1:]:
        assert norms == pytest.approx(results[0][0], rel=1e-6)
        for own, other in zip(parameters, results[0][1], strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_everything_else(model: torch.nn.Module) -> None:
    optimizer = MuonAndAdamW(model.named_parameters(), OptimConfig(algorithm="muon"))
    of_adamw = {id(parameter) for group in optimizer.adamw.param_groups for parameter in group["params"]}
    of_muon = {name for name, parameter in model.named_parameters() if id(parameter) not in of_adamw}
    assert of_muon == {
        f"blocks.{name}.weight"
        for name in ("0.mixer.in_proj", "0.mixer.out_proj", "1.mixer.up_proj", "1.mixer.out_proj", "2.mixer.qkv_proj")
    } | {"blocks.2.mixer.out_proj.weight"}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(map(id, parameters)) == sorted(map(id, model.parameters()))


def test_muon_moves_a_matrix_by_an_orthogonal_update_of_adamws_size() -> None:
    matrix = torch.nn.Parameter(torch.zeros(24, 16))
    optimizer = MuonAndAdamW(
        [("blocks.0.x", matrix), ("head", torch.nn.Parameter(torch.zeros(2)))],
        OptimConfig(algorithm="muon", learning_rate=0.5, weight_decay=0.0),
    )
    matrix.grad = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    singular = torch.linalg.svdvals(matrix.detach())
    assert float(singular.max() / singular.min()) < 2.0, "Newton-Schulz leaves them between 0.7 and 1.2"
    assert float(matrix.detach().square().mean().sqrt()) == pytest.approx(0.5 * 0.2, rel=0.3)


@pytest.mark.parametrize("update", ["clip_in_update", "compiled"])
def test_muon_is_refused_with_clipping_inside_adamws_update(update: AdamWUpdate) -> None:
    with pytest.raises(ConfigError, match=rf"optim.update: is {update}, .* allowed with optim.algorithm muon: fused"):
        OptimConfig(algorithm="muon", update=update)
